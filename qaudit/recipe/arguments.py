"""Keyword arguments -> Recipe and RunOptions, as the Python API and the commands give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qaudit.core.keys import nearest
from qaudit.errors import UsageError
from qaudit.recipe.table import recipe_of
from qaudit.settings import Entry, Nbytes, Recipe, RunOptions, settings_of

_MOST_NBYTES = 2.0**63


def recipe_and_options(*targets: str | Path, **settings: Any) -> tuple[Recipe, RunOptions]:
    """Return what to measure and how to run it; None stands for the default."""
    keys, options = split_settings(settings)
    return recipe_of(targets=[str(target) for target in targets], **keys), options


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], RunOptions]:
    """Return the given keys of a recipe, unchecked, and the run options, checked."""
    given = {name: value for name, value in settings.items() if value is not None}
    recipe, run = settings_of(Recipe), settings_of(RunOptions)
    for name in given:
        if name not in recipe and name not in run:
            raise UsageError(f"there is no setting `{name}`", hint=nearest(name, [*recipe, *run]))
    keys = {name: value for name, value in given.items() if name in recipe}
    options = {name: _option(run[name], given[name]) for name in given if name in run}
    return keys, RunOptions(**options)


def _option(entry: Entry, value: Any) -> Any:
    """Return the value of a run option, or refuse it."""
    if entry.type is Nbytes:
        return parse_nbytes(value)
    if entry.type is Path:
        return Path(value)
    least = entry.setting.at_least
    if type(value) is not entry.type or (least is not None and value < least):
        kind = "true or false" if entry.type is bool else f"a whole number from {least} on"
        raise UsageError(f"`{entry.name}` is `{value}`", hint=f"it must be {kind}")
    return value


def parse_nbytes(text: object) -> Nbytes:
    """Read a size with its unit: `512MB`, `60GB`, `1.5GiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)(B?)", str(text).strip().upper())
    if match is None:
        raise UsageError(f"`{text}` is not a size", hint="write it as 512MB, 4GB or 1.5GiB")
    number, unit, binary, _ = match.groups()
    nbytes = float(number) * (1024 if binary else 1000) ** " KMGT".index(unit or " ")
    if nbytes >= _MOST_NBYTES:
        raise UsageError(
            f"`{str(text)[:20]}` is more than any machine has", hint="write it as 512MB"
        )
    if match[0] == number and nbytes:
        raise UsageError(f"`{number}` has no unit", hint=f"write `{number}GB` or `{number}MB`")
    return Nbytes(int(nbytes))
