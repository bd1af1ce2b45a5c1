"""The command that measures the same again, and the lock that pins what it measures."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import fields

from qaudit.report.document import Block, Code, paragraph
from qaudit.report.format import printable
from qaudit.report.views import View
from qaudit.types import Recipe

LOCK_FILE = "plan.lock.json"  # as engine/planning/lock.py writes it beside the audit
PERMISSIONS = {"pickle": "--allow-pickle", "remote_code": "--trust-remote-code"}


def reproduce_section(view: View) -> tuple[Block, ...]:
    """Return what to type: the version, and one command."""
    audit, plan = view.audit, view.audit.plan
    needs = {need for subject in plan.subjects for c, _ in subject.members for need in c.requires}
    again = command(plan.recipe, needs, device=plan.device, dtype=plan.dtype)
    lines = [_version(audit.qaudit)] if audit.qaudit else []
    if plan.traffic is None:
        return (_commands(*lines, again),)
    pinned = " ".join(["qaudit", "scan", LOCK_FILE, *_permitted(needs)])
    return (
        _commands(*lines, pinned),
        paragraph(
            "The lock beside the audit pins every checkpoint and text to the commit that was "
            "measured. Without it:"
        ),
        _commands(again),
    )


def _commands(*lines: str) -> Code:
    return Code("\n".join(lines), "sh")


def _version(version: str) -> str:
    """A version between releases is on no index, so it is only named."""
    if "dev" in version:
        return f"# measured with qaudit {printable(version)}, which is no release"
    return f"pip install {shlex.quote(printable(f'qaudit-llm=={version}'))}"


def command(recipe: Recipe, needs: Collection[str] = (), **used: str) -> str:
    """Return the command line of a recipe.

    `needs` are what it has to permit, `used` settings that the plan has decided.
    """
    parts = ["qaudit", "scan", *recipe.targets, "--schemes", ",".join(recipe.schemes)]
    parts += [part for soup in recipe.soups for part in ("--soup", soup)]
    parts += [part for name in recipe.checkpoints for part in ("--checkpoints", name)]
    parts += [part for name in recipe.stages for part in ("--stage", name)]
    parts += ["--diagnose", ",".join(recipe.diagnostics)] if recipe.diagnostics else []
    asked = {"targets", "schemes", "soups", "checkpoints", "stages", "confidence", "schedule"}
    asked |= {"diagnostics"}
    for field in fields(recipe):
        value = used.get(field.name, getattr(recipe, field.name))
        if field.name in asked or value == field.default:
            continue
        option = f"--{field.name.replace('_', '-')}"
        parts += [option] if value is True else [option, str(value)]
    return " ".join(shlex.quote(printable(part)) for part in [*parts, *_permitted(needs)])


def _permitted(needs: Collection[str]) -> list[str]:
    return [flag for need, flag in PERMISSIONS.items() if need in needs]
