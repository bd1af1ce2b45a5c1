"""Help that groups options by purpose, and the environment variable of every option.

Typer draws groups in boxes only together with rich's markup, which would read names of
checkpoints as markup, too. So groups are plain sections, in the order of their first options.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

_ENVIRONMENT = "Every option and key is also a variable: `--out DIR` is QAUDIT_OUT=DIR."
_TYPES = {"str": "TEXT", "int": "N", "int range": "N", "float": "X", "float range": "X"}


MOST = 10
"""Options that `--help` shows: the first of a command with more."""
ALL = "--help-all"


class Grouped(TyperCommand):
    """A command whose help lists its options in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ALL in args:
            ctx.meta[ALL] = True
            typer.echo(ctx.get_help())
            raise typer.Exit
        return super().parse_args(ctx, args)

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Give every option its variable: `--dry-run` is QAUDIT_DRY_RUN."""
        super().__init__(*args, **settings)
        for param in self.params:
            if isinstance(param, TyperOption):
                param.envvar = variable(param)
                param.show_envvar = False  # a line of its own would double the help

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what it returns is the exit code."""
        raise typer.Exit(super().invoke(ctx) or 0)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        options = [p for p in self.params if isinstance(p, TyperOption)]
        hidden = [] if ALL in ctx.meta else options[MOST:]
        for param in self.get_params(ctx):
            if param in hidden:
                continue
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                panel = getattr(param, "rich_help_panel", None)
                title = panel or ("Arguments" if is_argument else "Options")
                name = record[0].partition(" <")[0] if is_argument else _with_type(record[0])
                groups.setdefault(title, []).append((name, _with_default(record[1])))
        for title, rows in sorted(groups.items(), key=lambda group: group[0] == "Options"):
            with formatter.section(title):
                formatter.write_dl(rows, col_max=28)
        notes = [f"`{ALL}` shows the other {len(hidden)} options."] if hidden else []
        notes += [_ENVIRONMENT] if options else []
        if notes:
            formatter.write_paragraph()
            formatter.write_text(" ".join(notes))


class CommandList(TyperGroup):
    """Commands in groups, each with its whole first sentence: Typer cuts those that are long."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        whole = 1000
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, each in self.commands.items():
            title = getattr(each, "rich_help_panel", "Commands")
            groups.setdefault(title, []).append((name, each.get_short_help_str(whole)))
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def group_options(app: typer.Typer) -> None:
    app.info.cls = CommandList
    for command in app.registered_commands:
        command.cls = Grouped
    for group in app.registered_groups:
        if group.typer_instance is not None:
            group_options(group.typer_instance)


def variable(option: Any) -> str:
    name = max(option.opts, key=len).lstrip("-").replace("-", "_")
    return f"QAUDIT_{name.upper()}"


def shown_default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    if isinstance(option.default, bool) or option.default is None:
        return "on" if option.default else "off" if option.is_flag else "none"
    return str(option.default)


def _with_type(text: str) -> str:
    """Name the type of an option as people would, not as Python does."""

    def kind(match: re.Match[str]) -> str:
        name = match[1].removeprefix("list[").removesuffix("]")
        return _TYPES.get(name, name.upper())

    return re.sub(r"<([\w\[\] |]+)>", kind, text)


def _with_default(text: str) -> str:
    """Print a default that is a text without the parentheses that Typer adds."""
    return re.sub(r"\[default: \((.*?)\)(?=;|\]$)", r"[default: \1", text)
