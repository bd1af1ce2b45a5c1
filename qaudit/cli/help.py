"""How a command's help reads: options by what they are for, the environment said once.

Typer draws groups in boxes only together with rich's markup, which would read names of
checkpoints as markup, too. So the groups are written as plain sections, in the order in which
their first options stand. Every option has its variable; naming each of them on a line of its
own would make the help twice as long.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

_ENVIRONMENT = (
    "Options may stand in the environment: `--disk-budget 60GB` is QAUDIT_DISK_BUDGET=60GB."
)
_NAMED = re.compile(r"\[env var: [A-Z_, ]+(?:; |\])")
_KINDS = {"str": "TEXT", "int": "N", "int range": "N", "float": "X", "float range": "X"}


class Grouped(TyperCommand):
    """A command whose help lists its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                own = getattr(param, "rich_help_panel", None)
                title = own or ("Arguments" if is_argument else "Options")
                name = record[0].partition(" <")[0] if is_argument else _named(record[0])
                groups.setdefault(title, []).append((name, _said(record[1])))
        for title, rows in sorted(groups.items(), key=lambda group: group[0] == "Options"):
            with formatter.section(title):
                formatter.write_dl(rows, col_max=28)
        if len(self.params) > 1:
            formatter.write_paragraph()
            formatter.write_text(_ENVIRONMENT)


def group_options(app: typer.Typer) -> None:
    """Let every command of an application, and of those in it, list its options in groups."""
    for command in app.registered_commands:
        command.cls = Grouped
    for group in app.registered_groups:
        if group.typer_instance is not None:
            group_options(group.typer_instance)


def _named(text: str) -> str:
    """Name what an option takes as people would, not as Python does."""

    def kind(match: re.Match[str]) -> str:
        name = match[1].removeprefix("list[").removesuffix("]")
        return _KINDS.get(name, name.upper())

    return re.sub(r"<([\w\[\] |]+)>", kind, text)


def _said(text: str) -> str:
    """Leave the variable out of an option's line."""
    return re.sub(r"\[$", "", _NAMED.sub(_rest, text)).rstrip()


def _rest(match: re.Match[str]) -> str:
    return "[" if match[0].endswith("; ") else ""
