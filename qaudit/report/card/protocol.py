"""The small print: protocol, environment and versions; notes; what was not measured."""

from __future__ import annotations

from typing import Any

from qaudit.report import sentences
from qaudit.report.document import Block, Table, bullets, code, columns, fold, prose, row, words
from qaudit.report.format import count, plural, size
from qaudit.report.views import View


def notes_section(view: View) -> tuple[Block, ...]:
    """Fold what was done differently, and the notes of the plan."""
    notes = [f.message for f in view.audit.findings if f.rule == "QA003"]
    notes += view.audit.plan.notes
    return (fold(plural(len(notes), "note"), bullets(*notes)),) if notes else ()


def skipped_section(view: View) -> tuple[Block, ...]:
    """List what was planned and not measured, with the reasons."""
    items = [
        (
            *code(s.subject),
            *words(f" under {s.scheme}" if s.scheme else ""),
            *words(": "),
            *prose(s.reason),
        )
        for s in view.audit.skipped
    ]
    return (bullets(*items),) if items else ()


def protocol_section(view: View) -> tuple[Block, ...]:
    """Fold how it was measured and with what."""
    audit, plan = view.audit, view.audit.plan
    tokens = max((row.tokens for row in audit.measurements), default=0)
    rows = [
        ("evaluated on", f"{plural(view.documents, view.unit)}, {tokens:,} tokens"),
        *((key.replace("_", " "), value) for key, value in audit.protocol.items()),
        ("model", f"{count(plan.parameters)} parameters, {plan.blocks} blocks"),
        ("computed in", f"{plan.dtype} on {plan.device}"),
        ("memory", sentences.memory(view)),
        ("time", sentences.seconds(view)),
        ("qaudit", audit.qaudit),
        *_flat(audit.environment),
    ]
    shown = tuple(row(key, _text(value)) for key, value in rows if value is not None)
    return (fold("Protocol, environment and versions", Table(columns("", ""), shown)),)


def _flat(environment: dict[str, Any]) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in environment.items():
        if isinstance(value, dict):
            rows += [(str(name), inner) for name, inner in value.items()]
        elif key.endswith("_nbytes") and isinstance(value, int):
            rows.append((key.removesuffix("_nbytes").replace("_", " "), size(value)))
        elif key != "qaudit":
            rows.append((key.replace("_", " "), value))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_text(inner) for inner in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
