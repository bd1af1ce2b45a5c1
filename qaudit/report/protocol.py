"""How it was measured and how to measure it again; notes; what was not measured."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from typing import Any

from qaudit.report import document as doc
from qaudit.report.format import count, duration, plural, printable, size
from qaudit.report.views import View
from qaudit.settings import settings_of, words_of
from qaudit.types import AuditRecord, Recipe

PLAN = "plan.json"  # beside the audit: saved/parts.py
PERMISSIONS = {
    "pickle": "--allow-pickle",
    "remote_code": "--trust-remote-code",
}


def notes_section(view: View) -> tuple[doc.Block, ...]:
    notes = [f.message for f in view.audit.findings if f.rule == "QA003"]
    return doc.bullets_of([*notes, *view.audit.plan.notes])


def skipped_section(view: View) -> tuple[doc.Block, ...]:
    skipped = view.audit.skipped
    return doc.bullets_of(
        [f"`{s.subject}`{(s.scheme and f' under {s.scheme}') or ''}: {s.reason}" for s in skipped]
    )


def protocol_section(view: View) -> tuple[doc.Block, ...]:
    audit, plan = view.audit, view.audit.plan
    tokens = max((row.tokens for row in audit.measurements), default=0)
    peak, before = (audit.environment.get(f"memory_{k}_nbytes") for k in ("peak", "baseline"))
    used = "peak not measured"
    if isinstance(peak, int) and isinstance(before, int):
        used = f"{size(max(0, peak - before))} measured"
    spent = duration(sum(score.seconds for score in audit.measurements))
    planned = f"{duration(plan.seconds_low)} to {duration(plan.seconds_high)}"
    rows = [
        ("evaluated on", f"{plural(view.documents, view.unit)}, {tokens:,} tokens"),
        *((key.replace("_", " "), value) for key, value in audit.protocol.items()),
        ("model", f"{count(plan.parameters)} parameters, {plan.blocks} blocks"),
        ("computed in", f"{plan.dtype} on {plan.device}"),
        ("memory", f"{size(plan.nbytes_memory)} planned above the libraries, {used}"),
        ("time", f"{spent} ({planned} planned)"),
        ("qaudit", audit.qaudit),
        *_flat(audit.environment),
    ]
    known = ((key, _text(value)) for key, value in rows if value is not None)
    return (doc.table(("", ""), known),)


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


def reproduce_section(view: View) -> tuple[doc.Block, ...]:
    audit, plan = view.audit, view.audit.plan
    again, lines = rescan(audit), []
    if "dev" in audit.qaudit:  # a version between releases is on no index
        lines = [f"# measured with qaudit {printable(audit.qaudit)}, which is no release"]
    elif audit.qaudit:
        lines = [f"pip install {shlex.quote(printable(f'qaudit-llm=={audit.qaudit}'))}"]
    if plan.traffic is None:
        return (doc.CodeBlock("\n".join([*lines, again]), "sh"),)
    pinned = " ".join(["qaudit", "scan", PLAN, *_permitted(_needs(audit))])
    return (
        doc.CodeBlock("\n".join([*lines, pinned]), "sh"),
        doc.paragraph(
            "The plan beside the audit pins every checkpoint and text to the commit that was "
            "measured. Without it:"
        ),
        doc.CodeBlock(again, "sh"),
    )


def rescan(audit: AuditRecord, **changed: Any) -> str:
    """Return the command line that measures an audit again, with some settings changed."""
    used = {"device": audit.plan.device, "dtype": audit.plan.dtype}
    return command(audit.plan.recipe, _needs(audit), **{**used, **changed})


def _needs(audit: AuditRecord) -> set[str]:
    members = [c for subject in audit.plan.subjects for c, _ in subject.members]
    return {need for checkpoint in members for need in checkpoint.requires}


def command(recipe: Recipe, needs: Collection[str] = (), **used: Any) -> str:
    """Return the command line of a recipe.

    `needs` are what it has to permit, `used` settings that the plan has decided.
    """
    settings = settings_of(Recipe)
    parts = ["qaudit", "scan", *recipe.targets]
    for name in dict.fromkeys((*_FIRST, *settings)):
        entry, value = settings[name], used.get(name, getattr(recipe, name))
        if value != entry.default or name == "schemes":
            value = json.dumps(value) if isinstance(value, dict) else value
            value = ",".join(value) if entry.name in _JOINED else value
            values = value if isinstance(value, tuple) else (value,)
            parts += (word for each in values for word in words_of(entry, each))
    return " ".join(shlex.quote(printable(part)) for part in [*parts, *_permitted(needs)])


_FIRST = ("schemes", "soups", "checkpoints", "diagnostics")
_JOINED = ("schemes", "bits", "tasks", "diagnostics")


def _permitted(needs: Collection[str]) -> list[str]:
    return [flag for need, flag in PERMISSIONS.items() if need in needs]
