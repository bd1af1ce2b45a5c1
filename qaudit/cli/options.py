"""Command-line options made from the table of settings, and those that commands share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin

import typer

from qaudit.core.scheme import BIT_CLASS, most_bits_first
from qaudit.errors import UsageError
from qaudit.settings import COMPUTE, OUTPUT, Entry, Nbytes, Presets, Recipe, RunOptions, settings_of

Command = TypeVar("Command", bound=Callable[..., int])


def option(panel: str, text: str, *names: str, **how: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **how)


Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET...", help="A Hub repository (`org/name`), a folder, a recipe, or `demo`."
    ),
]
AuditPlace = Annotated[
    str,
    typer.Argument(
        metavar="AUDIT", help="An output folder, its audit.json, or a repository with one."
    ),
]
DryRun = Annotated[
    bool, option(OUTPUT, "Print the plan and its price; measure nothing.", "--dry-run")
]
Device = Annotated[str | None, option(COMPUTE, "auto, cpu, cuda or mps.", show_default="auto")]
BITS = "Classes of bits per weight to decide, as 4,3."
AsJson = Annotated[bool, option(OUTPUT, "Print JSON.", "--json")]
Quiet = Annotated[bool, option(OUTPUT, "Print the result alone.", "--quiet", "-q")]
Verbose = Annotated[bool, option(OUTPUT, "Print a line at every block.", "--verbose", "-v")]


def classes_named(text: str | None) -> tuple[str, ...]:
    """Read `--bits 4,3`."""
    names = [name.strip() for name in text.split(",")] if text is not None else []
    for name in names:
        if not re.fullmatch(BIT_CLASS, name):
            raise UsageError(
                f"`{name}` of `--bits` is not a number of bits",
                hint="write `--bits 4,3`, or `--bits w4a4` with activations",
            )
    return tuple(sorted(set(names), key=most_bits_first))


def with_settings(*names: str, without: str = "") -> Callable[[Command], Command]:
    """Add the options of settings to a command, which takes them as `**settings`.

    They stand before its keyword-only parameters. Without names these are all settings that
    have an option, but for `without`.
    """
    table = {**settings_of(Presets), **settings_of(Recipe), **settings_of(RunOptions)}
    entries = [table[name] for name in names] or [
        entry for name, entry in table.items() if entry.setting.panel and name != without
    ]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        before = [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        after = [p for p in own if p.kind is p.KEYWORD_ONLY]
        parameters = [
            p.replace(kind=p.KEYWORD_ONLY) for p in (*before, *map(_parameter, entries), *after)
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameter(entry: Entry) -> inspect.Parameter:
    """Return the option of a setting; None where it is not given, whatever its default."""
    setting = entry.setting
    is_switch = entry.type is bool and "/" not in entry.flag
    kind: Any = entry.type if entry.type in (int, bool, Path) else str
    if get_origin(entry.type) is tuple:
        kind = list[str]
    info = option(
        setting.panel,
        setting.help,
        entry.flag,
        show_default=False if is_switch else entry.shown_default,
        metavar="SIZE" if entry.type is Nbytes else None,
        min=setting.at_least,
        max=setting.at_most,
    )
    return inspect.Parameter(
        entry.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, info],
    )


def audit_at(target: str, *, quiet: bool = False) -> Path:
    """Return the folder or file of an audit; download a published one."""
    if Path(target).exists():
        return Path(target)
    from qaudit.cli.progress import Progress
    from qaudit.hub.published import audit_folder

    with Progress(quiet=quiet) as progress:
        return audit_folder(target, progress)
