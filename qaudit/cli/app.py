"""The Typer application: every command, and how a run of it ends."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main
from typer.exceptions import TyperException

from qaudit.cli.doctor import doctor
from qaudit.cli.explain import explain
from qaudit.cli.export import export, soup
from qaudit.cli.gallery import gallery
from qaudit.cli.gate import gate
from qaudit.cli.help import group_options
from qaudit.cli.import_ import import_
from qaudit.cli.list import list_
from qaudit.cli.parts import collect, fetch, part, plan, status
from qaudit.cli.pick import pick
from qaudit.cli.publish import publish
from qaudit.cli.report import diff, report
from qaudit.cli.rollouts import rollouts
from qaudit.cli.scan import scan
from qaudit.cli.series import series
from qaudit.cli.terminal import say
from qaudit.cli.verify import verify
from qaudit.errors import UsageError
from qaudit.settings import SET, settings_of
from qaudit.version import __version__

app = typer.Typer(
    name="qaudit",
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
        app.command(command.__name__.rstrip("_"), rich_help_panel=title)(command)
group_options(app)


@functools.cache
def _group() -> typer.core.TyperGroup:
    return typer.main.get_group(app)


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
            message, hint = _no_option(option, where.command, command)
        raise UsageError(message, hint=hint) from error
    return 0


def _no_option(given: str, command: Any, name: str) -> tuple[str, str]:
    """Return a sentence and a hint: the key of that name, or the nearest option or key."""
    options = [option for p in command.params for option in p.opts if option.startswith("--")]
    keys = settings_of() if SET in options else {}
    word, message = given.strip("-").replace("-", "_"), f"`{name}` has no option `{given}`"
    if word in keys:
        return message, f"write `{SET} {word}=VALUE`; it takes {keys[word].kind}"
    written = {option.strip("-").replace("-", "_"): f"`{option}`" for option in options}
    written |= {key: f"`{SET} {key}=VALUE`" for key in keys if key not in written}
    near = get_close_matches(word, written, n=1)
    return message, f"did you mean {written[near[0]]}?" if near else f"see `{name} --help-all`"
