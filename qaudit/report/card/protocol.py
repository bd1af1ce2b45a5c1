"""The small print: protocol, environment and versions; notes; what was not measured."""

from __future__ import annotations

from typing import Any

from qaudit.report import sentences
from qaudit.report.format import count, plural, size
from qaudit.report.markdown import code, folded, plain, prose, table
from qaudit.report.views import View


def notes_section(view: View) -> str:
    """Fold what was done differently, and what the plan had to say."""
    said = [f.message for f in view.audit.findings if f.rule == "QA003"]
    lines = [f"- {prose(text)}" for text in (*said, *view.audit.plan.notes)]
    return folded(plural(len(lines), "note"), "\n".join(lines)) if lines else ""


def skipped_section(view: View) -> str:
    """List what was planned and not measured, with the reasons."""
    return "\n".join(
        f"- {code(s.subject)}" + (f" under {plain(s.scheme)}" if s.scheme else "")
        + f": {prose(s.reason)}"
        for s in view.audit.skipped
    )  # fmt: skip


def protocol_section(view: View) -> str:
    """Fold how it was measured and with what."""
    audit, plan = view.audit, view.audit.plan
    tokens = max((score.tokens for score in audit.measurements), default=0)
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
    shown = [[plain(key), plain(_text(value))] for key, value in rows if value is not None]
    return folded("Protocol, environment and versions", table(["", ""], shown))


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
