"""The Typer application: every command, its help, and how a run of it ends.

Typer draws groups in boxes only together with rich's markup, which would read names of
checkpoints as markup, too. So groups are plain sections, in the order of their first options.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.exceptions import TyperException

from qaudit.cli.about import doctor, explain, list_
from qaudit.cli.export import export, soup, verify
from qaudit.cli.gate import gate, pick
from qaudit.cli.report import diff, gallery, publish, report, series
from qaudit.cli.scan import collect, fetch, part, plan, scan, status
from qaudit.cli.terminal import say
from qaudit.cli.text import import_, rollouts
from qaudit.errors import UsageError
from qaudit.settings import SET, settings_of
from qaudit.version import __version__

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
                name = max(param.opts, key=len).lstrip("-").replace("-", "_")
                param.envvar = f"QAUDIT_{name.upper()}"
                param.show_envvar = False  # a line of its own would double the help

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what it returns is the exit code."""
        raise typer.Exit(super().invoke(ctx) or 0)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        typed = re.compile(r"<([\w\[\] |]+)>")

        def kind(match: re.Match[str]) -> str:
            """Name the type of an option as people would, not as Python does."""
            name = match[1].removeprefix("list[").removesuffix("]")
            return _TYPES.get(name, name.upper())

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
                name = record[0].partition(" <")[0] if is_argument else typed.sub(kind, record[0])
                # A default that is a text is printed without the parentheses that Typer adds.
                text = re.sub(r"\[default: \((.*?)\)(?=;|\]$)", r"[default: \1", record[1])
                groups.setdefault(title, []).append((name, text))
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


app = typer.Typer(
    name="qaudit",
    cls=CommandList,
    help="Which checkpoint or soup should ship, and does it survive 3- and 4-bit quantization?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback with locals can hold a token
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    rich_markup_mode=None,
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Which checkpoint or soup should ship, and does it survive 3- and 4-bit quantization?"""


_GROUPS: dict[str, tuple[Callable[..., int], ...]] = {
    "Commands": (scan, pick, gate, export, verify, report),
    "More": (series, soup, diff, list_, explain, doctor),
    "Clusters": (plan, part, collect, status, fetch),
    "Publish": (publish, gallery),
    "The model's own text": (rollouts, import_),
}
for title, commands in _GROUPS.items():
    for command in commands:
        app.command(command.__name__.rstrip("_"), cls=Grouped, rich_help_panel=title)(command)


_group = functools.cache(lambda: typer.main.get_group(app))


def run(argv: list[str]) -> int:
    group = _group()
    name = "hf qaudit" if Path(argv[0]).stem == "hf-qaudit" else "qaudit"
    if "_QAUDIT_COMPLETE" in os.environ:
        try:
            group(argv[1:], prog_name=name)  # a shell asks for completions
        except SystemExit as end:
            return int(end.code or 0)
    if "--out=" in argv or ("--out", "") in pairwise(argv):  # as a path it would be this folder
        raise UsageError("`--out` is empty", hint="name a folder; `.` is the one you are in")
    return invoke(group, name, argv[1:])


def invoke(group: typer.core.TyperGroup, name: str, arguments: list[str]) -> int:
    """Run a command of a group; one that does not parse is a usage error with a hint."""
    try:
        with group.make_context(name, arguments) as context:
            group.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except TyperException as error:  # the command line does not parse
        message = error.format_message()
        where = getattr(error, "ctx", None)
        if where is not None and message == where.get_help():
            say(message)
            return 2
        command = name if where is None else where.command_path
        message, hint = message.rstrip("."), f"see `{command} --help`"
        if where is not None and (option := getattr(error, "option_name", None)):
            message = f"`{command}` has no option `{option}`"
            hint = _instead_of(option, where.command) or f"see `{command} --help-all`"
        raise UsageError(message, hint=hint) from error
    return 0


def _instead_of(given: str, command: Any) -> str:
    """Return a hint: the key of that name, or the nearest option or key, if there is one."""
    options = [option for p in command.params for option in p.opts if option.startswith("--")]
    keys, word = settings_of() if SET in options else {}, given.strip("-").replace("-", "_")
    if word in keys:
        return f"write `{SET} {word}=VALUE`; it takes {keys[word].kind}"
    written = {option.strip("-").replace("-", "_"): f"`{option}`" for option in options}
    written |= {key: f"`{SET} {key}=VALUE`" for key in keys if key not in written}
    near = get_close_matches(word, written, n=1)
    return f"did you mean {written[near[0]]}?" if near else ""
