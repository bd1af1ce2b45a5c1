"""The command that measures the same again, and the lock that pins what it measures."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import fields

from qaudit.report.format import printable
from qaudit.report.views import View
from qaudit.types import Recipe

LOCK_FILE = "plan.lock.json"  # as engine/planning/lock.py writes it beside the audit
PERMISSIONS = {"pickle": "--allow-pickle", "remote_code": "--trust-remote-code"}


def reproduce_section(view: View) -> str:
    """Return what to type: the version, and one command."""
    audit, plan = view.audit, view.audit.plan
    needs = {need for subject in plan.subjects for c, _ in subject.members for need in c.requires}
    asked = command(plan.recipe, needs)
    lines = [_version(audit.qaudit)] if audit.qaudit else []
    if plan.traffic is None:
        return _block([*lines, asked])
    pinned = " ".join(["qaudit", "scan", LOCK_FILE, *_permitted(needs)])
    return (
        f"{_block([*lines, pinned])}\n\nThe lock beside the audit pins every checkpoint and text "
        f"to the commit that was measured. What was asked for:\n\n{_block([asked])}"
    )


def _block(lines: list[str]) -> str:
    return "\n".join(["```sh", *lines, "```"])


def _version(version: str) -> str:
    """A version between releases is on no index, so it is only named."""
    if "dev" in version:
        return f"# measured with qaudit {printable(version)}, which is no release"
    return f"pip install {shlex.quote(printable(f'qaudit-llm=={version}'))}"


def command(recipe: Recipe, needs: Collection[str] = ()) -> str:
    """Return the command line that asks for a recipe; `needs` are what it has to permit."""
    parts = ["qaudit", "scan", *recipe.targets, "--schemes", ",".join(recipe.schemes)]
    parts += [part for soup in recipe.soups for part in ("--soup", soup)]
    parts += [part for name in recipe.checkpoints for part in ("--checkpoints", name)]
    parts += [part for name in recipe.stages for part in ("--stage", name)]
    parts += ["--diagnose", ",".join(recipe.diagnostics)] if recipe.diagnostics else []
    asked = {"targets", "schemes", "soups", "checkpoints", "stages", "confidence", "schedule"}
    asked |= {"diagnostics"}
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if field.name in asked or value == field.default:
            continue
        option = f"--{field.name.replace('_', '-')}"
        parts += [option] if value is True else [option, str(value)]
    return " ".join(shlex.quote(printable(part)) for part in [*parts, *_permitted(needs)])


def _permitted(needs: Collection[str]) -> list[str]:
    return [flag for need, flag in PERMISSIONS.items() if need in needs]
