"""How it was measured and how to measure it again; notes; what was not measured."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from typing import Any

from qaudit.report import document as doc
from qaudit.report.format import count, duration, plural, printable, size
from qaudit.report.views import View
from qaudit.settings import Entry, settings_of, words_of
from qaudit.types import AuditRecord, Recipe

PLAN = "plan.json"  # beside the audit: saved/parts.py
PERMISSIONS = {
    "pickle": "--allow-pickle",
    "remote_code": "--trust-remote-code",
}


def notes_section(view: View) -> tuple[doc.Block, ...]:
    notes = [f.message for f in view.audit.findings if f.rule == "QA003"]
    notes += view.audit.plan.notes
    return (doc.bullets(*notes),) if notes else ()


def skipped_section(view: View) -> tuple[doc.Block, ...]:
    skipped = (
        (f"{s.subject}` under {s.scheme}" if s.scheme else f"{s.subject}`", s.reason)
        for s in view.audit.skipped
    )
    items = [f"`{what}: {reason}" for what, reason in skipped]
    return (doc.bullets(*items),) if items else ()


def protocol_section(view: View) -> tuple[doc.Block, ...]:
    audit, plan = view.audit, view.audit.plan
    tokens = max((row.tokens for row in audit.measurements), default=0)
    rows = [
        ("evaluated on", f"{plural(view.documents, view.unit)}, {tokens:,} tokens"),
        *((key.replace("_", " "), value) for key, value in audit.protocol.items()),
        ("model", f"{count(plan.parameters)} parameters, {plan.blocks} blocks"),
        ("computed in", f"{plan.dtype} on {plan.device}"),
        ("memory", _memory(view)),
        ("time", _seconds(view)),
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


def _memory(view: View) -> str:
    planned = f"{size(view.audit.plan.nbytes_memory)} planned above the libraries"
    peak = view.audit.environment.get("memory_peak_nbytes")
    baseline = view.audit.environment.get("memory_baseline_nbytes")
    if not isinstance(peak, int) or not isinstance(baseline, int):
        return f"{planned}, peak not measured"
    return f"{planned}, {size(max(0, peak - baseline))} measured"


def _seconds(view: View) -> str:
    spent = sum(score.seconds for score in view.audit.measurements)
    plan = view.audit.plan
    return (
        f"{duration(spent)} ({duration(plan.seconds_low)} to {duration(plan.seconds_high)} planned)"
    )


def reproduce_section(view: View) -> tuple[doc.Block, ...]:
    audit, plan = view.audit, view.audit.plan
    needs, again = _needs(audit), rescan(audit)
    lines = [_version(audit.qaudit)] if audit.qaudit else []
    if plan.traffic is None:
        return (_commands(*lines, again),)
    pinned = " ".join(["qaudit", "scan", PLAN, *_permitted(needs)])
    return (
        _commands(*lines, pinned),
        doc.paragraph(
            "The plan beside the audit pins every checkpoint and text to the commit that was "
            "measured. Without it:"
        ),
        _commands(again),
    )


def rescan(audit: AuditRecord, **changed: Any) -> str:
    """Return the command line that measures an audit again, with some settings changed."""
    used = {"device": audit.plan.device, "dtype": audit.plan.dtype}
    return command(audit.plan.recipe, _needs(audit), **{**used, **changed})


def _needs(audit: AuditRecord) -> set[str]:
    members = [c for subject in audit.plan.subjects for c, _ in subject.members]
    return {need for checkpoint in members for need in checkpoint.requires}


def _commands(*lines: str) -> doc.CodeBlock:
    return doc.CodeBlock("\n".join(lines), "sh")


def _version(version: str) -> str:
    """A version between releases is on no index, so it is only named."""
    if "dev" in version:
        return f"# measured with qaudit {printable(version)}, which is no release"
    return f"pip install {shlex.quote(printable(f'qaudit-llm=={version}'))}"


def command(recipe: Recipe, needs: Collection[str] = (), **used: Any) -> str:
    """Return the command line of a recipe.

    `needs` are what it has to permit, `used` settings that the plan has decided.
    """
    settings = settings_of(Recipe)
    parts = ["qaudit", "scan", *recipe.targets]
    for name in dict.fromkeys((*_FIRST, *settings)):
        entry, value = settings[name], used.get(name, getattr(recipe, name))
        if value != entry.default or name == "schemes":
            parts += _words(entry, value)
    return " ".join(shlex.quote(printable(part)) for part in [*parts, *_permitted(needs)])


_FIRST = ("schemes", "soups", "checkpoints", "diagnostics")
_JOINED = ("schemes", "bits", "tasks", "diagnostics")


def _words(entry: Entry, value: Any) -> list[str]:
    if isinstance(value, dict):
        value = json.dumps(value)
    if entry.name in _JOINED:
        value = ",".join(value)
    values = value if isinstance(value, tuple) else (value,)
    return [word for value in values for word in words_of(entry, value)]


def _permitted(needs: Collection[str]) -> list[str]:
    return [flag for need, flag in PERMISSIONS.items() if need in needs]
