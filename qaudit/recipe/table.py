"""Read settings from YAML, from arguments or from `--set`; check each, and name every wrong one.

The keys of a recipe are those of `qaudit.settings.Recipe`. An option given beside a recipe replaces
its key. Paths in a recipe are relative to the working directory, as on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from qaudit.core.schedules import build
from qaudit.core.scheme import BIT_CLASS, most_bits_first
from qaudit.diagnostics.diagnostic import parse_diagnostics
from qaudit.errors import RecipeError, SchemeError, UsageError
from qaudit.settings import (
    GROUPS,
    PRESETS,
    SET,
    Entry,
    Execution,
    Nbytes,
    Presets,
    Recipe,
    RunOptions,
    Sampling,
    Settings,
    settings_of,
)
from qaudit.support.foreign import yaml_file, yaml_of
from qaudit.support.keys import as_list, explain, nearest

Group = TypeVar("Group", Recipe, Presets, RunOptions, Execution, Sampling)
DEMO = "demo"
_MOST_NBYTES = 2.0**63


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


class _Soup(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: str
    merge: str = "mean"
    of: Annotated[list[str], Field(min_length=1)]


def _soup_text(value: object) -> object:
    if not isinstance(value, dict):
        return value
    soup = _Soup.model_validate(value)
    return f"{soup.label}={soup.merge}({'+'.join(soup.of)})"


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", value):
        raise ValueError(f"`{value}` is not a device; it is auto, cpu, cuda or cuda:1")
    return value


def _bits(value: object) -> object:
    """Return classes of bits, from `4,3` or a list; YAML reads one as a number."""
    items = value if isinstance(value, list | tuple) else [value]
    names = [name.strip() for item in items for name in str(item).split(",")]
    for name in names:
        if not re.fullmatch(BIT_CLASS, name):
            raise ValueError(f"`{name}` is not a number of bits; write `4,3`, for example")
    return sorted(set(names), key=most_bits_first)


def _diagnostics(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return each diagnostic by its display name; `all` names every one."""
    try:
        return tuple(diagnostic.short for diagnostic in parse_diagnostics(value))
    except SchemeError as error:
        raise ValueError(f"{error.message}; {error.hint}") from error


def _names(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for text in value for name in text.split(",") if name.strip())


def _folder(value: object) -> object:
    if not str(value):
        raise ValueError("it is empty; name a folder")
    return value


def _task_items(value: object) -> str:
    text = str(value)
    if text != "all" and not (text.isdecimal() and 0 < int(text) < 10**9):
        raise ValueError(f"`{text}` is no number of items; it is 500, for example, or all")
    return text


def _schedule(value: dict[str, Any]) -> dict[str, Any]:
    parameters = {k: v for k, v in value.items() if k not in ("kind", "units")}
    try:
        build(str(value.get("kind")), **parameters)
    except ValueError as error:
        hint = "for example `{kind: linear, peak: 0.003, end: 1000}`"
        raise ValueError(f"{error}; {hint}") from error
    return value


_TEXTS = Annotated[tuple[str, ...], BeforeValidator(as_list)]
_SOUPS = Annotated[
    tuple[Annotated[str, BeforeValidator(_soup_text)], ...], BeforeValidator(as_list)
]
_CHECKS: dict[str, Any] = {
    "keep": AfterValidator(_names),
    "out": BeforeValidator(_folder),
    "bits": BeforeValidator(_bits),
    "device": AfterValidator(_device),
    "confidence": Field(gt=0, lt=1),
    "task_items": BeforeValidator(_task_items),
    "tasks": AfterValidator(_names),
    "schedule": AfterValidator(_schedule),
    "diagnostics": AfterValidator(_diagnostics),
    "policy": Field(min_length=1),
}
"""Checks beyond type and bounds."""


def _key(entry: Entry) -> Any:
    kind = entry.type
    if get_origin(kind) is tuple:
        kind = _SOUPS if entry.name == "soups" else _TEXTS
    elif kind is Nbytes:
        kind = Annotated[int, BeforeValidator(parse_nbytes)]
    elif kind is float:
        kind = Annotated[float, Field(allow_inf_nan=False)]
    elif kind in (int, bool):  # strict: `true` is not a number, and neither is "64"
        low, high = entry.at_least, entry.at_most
        kind = Annotated[kind, Field(strict=True, ge=low, le=high)]
    if entry.name in _CHECKS:
        kind = Annotated[kind, _CHECKS[entry.name]]
    return (kind | None if entry.optional else kind, entry.default)


_FOR_READERS: dict[str, Any] = {
    "description": (str, ""),
    "sources": (_TEXTS, ()),
    "unverified": (_TEXTS, ()),
}
"""Keys of a recipe that change nothing."""


def _made(group: Settings) -> Any:
    keys = {name: _key(entry) for name, entry in settings_of(group).items()}
    if group is Recipe:
        targets = {"targets": (Annotated[_TEXTS, Field(min_length=1)], ...)}
        keys = {**targets, **keys, **_FOR_READERS}
    return create_model(f"_{group.__name__}", __config__=ConfigDict(extra="forbid"), **keys)


_MODELS = {group: _made(group) for group in GROUPS}


def _checked(group: type[Group], table: Mapping[str, Any], where: str = "") -> Group:
    """Check a table of keys and return the group of them; errors begin with `where`."""
    model = _MODELS[group]
    allowed = {"": tuple(model.model_fields), "soups": tuple(_Soup.model_fields)}
    try:
        checked = model.model_validate(table)
    except ValidationError as error:
        sentence, hint = explain(error.errors(), allowed)
        raise RecipeError(f"{where}{sentence}", hint=hint) from error
    return group(**{field.name: getattr(checked, field.name) for field in fields(group)})


def recipe_of(**keys: Any) -> Recipe:
    """Return the recipe of keyword arguments; a recipe file among the targets is read first."""
    keys = {key: value for key, value in keys.items() if value is not None}
    targets = [str(target) for target in keys.get("targets", ())]
    files = [target for target in targets if target == DEMO or is_recipe(target)]
    if not files:
        return recipe_from(keys)
    if len(targets) > 1:
        raise UsageError(
            f"`{files[0]}` is a recipe, and there are other targets beside it",
            hint="scan a recipe by itself; its own `targets` may be several",
        )
    path = recipes_folder() / "demo.yaml" if files == [DEMO] else find_recipe(files[0])
    table = _read(path)
    recipe_from(table, f"`{path}`: ")  # an error in the file names the file
    return recipe_from({**table, **keys, "targets": table["targets"]})


def read_recipe(path: Path) -> Recipe:
    return recipe_from(_read(path), f"`{path}`: ")


def recipe_from(table: Mapping[str, Any], where: str = "") -> Recipe:
    """Check a table of keys and return its recipe; errors begin with `where`."""
    return _checked(Recipe, table, where)


def recipes_folder() -> Path:
    """Return the folder of recipes that ship with this installation.

    A wheel carries it inside the package; in a checkout or an editable install it is
    beside the package, where people read and change it.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def is_recipe(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))


def shipped_recipes() -> dict[str, str]:
    """Return the description of each shipped recipe by the name that `scan` takes."""
    paths = sorted(recipes_folder().glob("*.yaml"))
    return {f"recipes/{p.name}": " ".join(str(_read(p)["description"]).split()) for p in paths}


def find_recipe(target: str) -> Path:
    """Return the file of a target: one that exists here, or else a shipped one of that name.

    `recipes/olmo2-7b.yaml` is a path in a clone and means the same where only the wheel is
    installed. A file under the working directory wins: it may be a changed copy.
    """
    path = Path(target)
    shipped = recipes_folder() / path.name
    if path.exists() or path.parent not in (Path(), Path("recipes")) or not shipped.is_file():
        return path
    return shipped


def _read(path: Path) -> dict[str, Any]:
    try:
        table, _ = yaml_file(path)
    except RecipeError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        here = [str(path.parent / p.name) for p in path.parent.glob("*.y*ml")]
        near = get_close_matches(str(path), [*here, *shipped_recipes()], n=1)
        hint = f"did you mean `{near[0]}`?" if near else "see `qaudit list recipes`"
        raise RecipeError(f"there is no recipe `{path}`", hint=hint) from error
    if not isinstance(table, dict):
        raise RecipeError(
            f"`{path}` is not a recipe", hint="a recipe is a table of keys, `targets` among them"
        )
    return table


def recipe_and_options(*targets: str | Path, **settings: Any) -> tuple[Recipe, RunOptions]:
    """Return the recipe and the options of a run; None stands for the default."""
    keys, options = split_settings(settings)
    return recipe_of(targets=[str(target) for target in targets], **keys), options


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], RunOptions]:
    """Return the keys of a recipe, unchecked, and the run options, checked."""
    rest = dict(settings)
    options, presets = take(RunOptions, rest), take(Presets, rest)
    recipe = settings_of(Recipe)
    if unknown := [name for name in rest if name not in recipe]:
        names = settings_of(Recipe, RunOptions, Presets)
        raise UsageError(f"there is no setting `{unknown[0]}`", hint=nearest(unknown[0], names))
    keys = {name: value for name, value in rest.items() if value is not None}
    return {**(PRESETS["quick"] if presets.quick else {}), **keys}, options


def take(group: type[Group], settings: dict[str, Any]) -> Group:
    """Remove the settings of a group from `settings`, and return them checked."""
    values = {name: settings.pop(name, None) for name in settings_of(group)}
    return _checked(group, {name: value for name, value in values.items() if value is not None})


def set_values(texts: Sequence[str], taken: Collection[str], command: str) -> dict[str, Any]:
    """Read `key=value` of `--set`; `taken` are the keys that a command takes.

    Of a key that is repeated, the last value counts, or all of a key of several texts.
    """
    entries, values = settings_of(), dict[str, Any]()
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in taken:
            message = f"`qaudit {command}` takes no `{name}`"
            message = message if name in entries else f"there is no setting `{name}`"
            raise UsageError(message, hint=nearest(name, taken))
        if not equals:
            raise UsageError(
                f"`{SET} {text}` has no value",
                hint=f"write `{SET} {name}=VALUE`; it takes {entries[name].kind}",
            )
        is_list = get_origin(entries[name].type) is tuple
        parsed = value_of(entries[name], value)
        values[name] = [*values.get(name, ()), parsed] if is_list else parsed
    return values


def value_of(entry: Entry, text: str) -> Any:
    """Read one value as the command line and the environment have it."""
    reader = _READERS.get(get_origin(entry.type) or entry.type, str)
    try:
        return reader(text)
    except (KeyError, ValueError) as error:
        raise RecipeError(f"`{entry.name}` is `{text}`", hint=f"it must be {entry.kind}") from error


_SWITCHES = dict.fromkeys(("true", "1", "yes", "on"), True)
_SWITCHES |= dict.fromkeys(("false", "0", "no", "off"), False)  # as Typer has them
_READERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: lambda text: _SWITCHES[text.lower()],
    dict: yaml_of,
}
