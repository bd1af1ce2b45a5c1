"""Command-line options made from the table of settings, and those that commands share."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_origin

import typer

from qaudit.core.scheme import BIT_CLASS, most_bits_first
from qaudit.errors import UsageError
from qaudit.settings import OUTPUT, SET, Entry, settings_of

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
BITS = "Classes of bits per weight to decide, as 4,3."
AsJson = Annotated[bool, option(OUTPUT, "Print JSON.", "--json")]
Quiet = Annotated[bool, option(OUTPUT, "Print the result alone.", "--quiet", "-q")]


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


def with_settings(
    *first: str, more: Sequence[str] = (), keys: Iterable[str] = ()
) -> Callable[[Command], Command]:
    """Add settings to a command, which takes the values of all as `**settings`.

    Options of the `first` follow its own, those of `more` come behind `--set`, which takes the
    names of all of them and `keys` besides.
    """
    table, options = settings_of(), [*first, *more]
    taken = [*dict.fromkeys([*options, *keys])]

    def decorate(command: Command) -> Command:
        takes = inspect.signature(command, eval_str=True).parameters.values()
        before = [p for p in takes if p.kind is p.POSITIONAL_OR_KEYWORD]
        after = [p for p in takes if p.kind is p.KEYWORD_ONLY and p.name not in _LAST]
        last = [p for p in takes if p.kind is p.KEYWORD_ONLY and p.name in _LAST]
        parameters = [*before, *(_parameter(table[name]) for name in first), *after]
        parameters += [_SET] * (len(taken) > len(options))
        parameters += [*(_parameter(table[name]) for name in more), *last]
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters]

        @wraps(command)
        def run(*, set_: Sequence[str] = (), **given: Any) -> int:
            from qaudit.recipe.table import set_values, value_of

            chosen = set_values(set_ or (), taken, command.__name__.rstrip("_"))
            for name in chosen.keys() & options:
                if given[name] is not None:
                    raise UsageError(f"`{name}` is set twice", hint=f"leave `{SET} {name}` out")
            values: dict[str, Any] = dict.fromkeys(taken)
            for name in taken if keys else ():
                entry = table[name]  # Typer reads the variables of options
                text = "" if entry.option else os.environ.get(entry.variable, "")
                if text:
                    is_list = get_origin(entry.type) is tuple
                    values[name] = text.split() if is_list else value_of(entry, text)
            return command(**{**values, **given, **chosen})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return cast(Command, run)

    return decorate


_LAST = ("as_json", "quiet")
_SET = inspect.Parameter(
    "set_",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        list[str] | None,
        option(OUTPUT, "One of `qaudit list settings`; repeatable.", SET, metavar="KEY=VALUE"),
    ],
)


def _parameter(entry: Entry) -> inspect.Parameter:
    """Return the option of a setting; None where it is not given, whatever its default."""
    kind: Any = entry.type if entry.type in (int, float, bool, Path) else str
    if get_origin(entry.type) is tuple:
        kind = list[str]
    info = option(
        entry.panel,
        entry.help,
        entry.option,
        show_default=False if entry.type is bool else entry.shown_default,
        min=entry.at_least,
        max=entry.at_most,
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
    from qaudit.hub.publish import audit_folder

    with Progress(quiet=quiet) as progress:
        return audit_folder(target, progress)
