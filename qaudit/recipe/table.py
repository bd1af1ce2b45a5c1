"""The keys of a recipe, from YAML or from options, each checked and every wrong one named.

The keys are the options of `qaudit scan` with underscores; an option given beside a recipe
takes the place of its key. Paths in a recipe are read from the working directory, as they
would be on the command line.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from qaudit import recipes_folder
from qaudit.core.foreign import yaml_of
from qaudit.core.keys import explain, nearest
from qaudit.core.registry import DEFAULT_SCHEMES, parse_diagnostics
from qaudit.core.schedules import build
from qaudit.errors import RecipeError, SchemeError, UsageError
from qaudit.types import Recipe

DEMO = "demo"


class _Soup(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: str
    merge: str = "mean"
    of: Annotated[list[str], Field(min_length=1)]

    def text(self) -> str:
        return f"{self.label}={self.merge}({'+'.join(self.of)})"


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str | dict) else value


def _soup_text(value: object) -> object:
    """Read a soup's table; a text is read when checkpoints are known."""
    return _Soup.model_validate(value).text() if isinstance(value, dict) else value


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", value):
        raise ValueError(f"`{value}` is not a device; it is auto, cpu, cuda, cuda:1 or mps")
    return value


def _diagnostics(value: list[str]) -> list[str]:
    """Return each diagnostic by its display name; `all` becomes those there are."""
    try:
        return [diagnostic.short for diagnostic in parse_diagnostics(value)]
    except SchemeError as error:
        raise ValueError(f"{error.message}; {error.hint}") from error


_Texts = Annotated[list[str], BeforeValidator(_as_list)]
_Soups = Annotated[list[Annotated[str, BeforeValidator(_soup_text)]], BeforeValidator(_as_list)]
_Count = Annotated[int, Field(strict=True, ge=1)]


class _Table(BaseModel):
    """The keys of a recipe, as they may stand in its file."""

    model_config = ConfigDict(extra="forbid")

    targets: Annotated[_Texts, Field(min_length=1)]
    schemes: _Texts = list(DEFAULT_SCHEMES)
    checkpoints: _Texts = []
    stages: _Texts = []
    every: _Count | None = None
    last: _Count | None = None
    limit: _Count | None = None
    soups: _Soups = []
    calibration: str | None = None
    evaluation: str | None = None
    choices: str | None = None
    context: Annotated[int, Field(strict=True, ge=2)] | None = None
    stride: _Count | None = None
    bos: Literal["auto", "always", "never"] = "auto"
    packed: Annotated[bool, Field(strict=True)] = False
    evaluation_documents: Annotated[int, Field(strict=True, ge=2)] = 64
    calibration_documents: _Count = 64
    document_tokens: Annotated[int, Field(strict=True, ge=2)] | None = None
    calibration_seed: Annotated[int, Field(strict=True, ge=0)] = 0
    repeats: Annotated[int, Field(strict=True, ge=1, le=16)] = 1
    device: Annotated[str, AfterValidator(_device)] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    schedule: dict[str, Any] | None = None
    family: str | None = None
    diagnostics: Annotated[_Texts, AfterValidator(_diagnostics)] = []
    policy: Annotated[str, Field(min_length=1)] = "release"
    description: str = ""
    sources: _Texts = []
    unverified: _Texts = []


_ALLOWED = {"": list(_Table.model_fields), "soups": list(_Soup.model_fields)}


def recipe_of(**asked: Any) -> Recipe:
    """Return the recipe that options ask for; a recipe file among the targets is read first."""
    given = {key: value for key, value in asked.items() if value is not None}
    targets = [str(target) for target in given.get("targets", ())]
    files = [target for target in targets if target == DEMO or is_recipe(target)]
    if not files:
        return _checked(given, "")
    if len(targets) > 1:
        raise UsageError(
            f"`{files[0]}` is a recipe and stands beside other targets",
            hint="scan a recipe by itself; its own `targets` may be several",
        )
    path = recipes_folder() / "demo.yaml" if files == [DEMO] else find_recipe(files[0])
    table = _read(path)
    _checked(table, f"`{path}`: ")
    return _checked({**table, **given, "targets": table["targets"]}, "")


def recipe_from(table: dict[str, Any]) -> Recipe:
    """Return the recipe in a table that was read from elsewhere, checked like any other."""
    return _checked(table, "")


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in a YAML file."""
    return _checked(_read(path), f"`{path}`: ")


def is_recipe(target: str) -> bool:
    """Say whether a target is a recipe's file, by its name."""
    return target.endswith((".yaml", ".yml"))


def shipped_recipes() -> dict[str, str]:
    """Return every shipped recipe as it is given to `scan`, with its description."""
    paths = sorted(recipes_folder().glob("*.yaml"))
    return {f"recipes/{p.name}": " ".join(str(_read(p)["description"]).split()) for p in paths}


def find_recipe(target: str) -> Path:
    """Return the file a target names: one that exists here, or else a shipped one so called.

    `recipes/olmo2-7b.yaml` is a path in a clone and has to mean the same where only the wheel is
    installed. What lies under the working directory wins: it may be a changed copy.
    """
    path = Path(target)
    shipped = recipes_folder() / path.name
    if path.exists() or path.parent not in (Path(), Path("recipes")) or not shipped.is_file():
        return path
    return shipped


def _nearly(path: Path) -> str:
    """Return a hint for a recipe that is not there: one called nearly so, here or shipped."""
    here = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = nearest(path.name, here)
    if hint.startswith("did you mean"):
        return hint
    hint = nearest(path.stem, [Path(name).stem for name in shipped_recipes()])
    if hint.startswith("did you mean"):
        return hint.replace("`", "`recipes/", 1).replace("`?", ".yaml`?")
    return "`qaudit list recipes` names what ships"


def _read(path: Path) -> dict[str, Any]:
    try:
        table = yaml_of(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecipeError(f"there is no recipe `{path}`", hint=_nearly(path)) from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"`{path}` cannot be read: {reason}", hint="write it as YAML") from error
    if not isinstance(table, dict):
        raise RecipeError(
            f"`{path}` is not a recipe", hint="a recipe is a table of keys, `targets` among them"
        )
    return table


def _checked(table: dict[str, Any], where: str) -> Recipe:
    try:
        checked = _Table.model_validate(table)
    except ValidationError as error:
        sentence, hint = explain(error.errors(), _ALLOWED)
        raise RecipeError(f"{where}{sentence}", hint=hint) from error
    _check_schedule(checked.schedule, where)
    values: dict[str, Any] = {}
    for field in fields(Recipe):
        value = getattr(checked, field.name)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return Recipe(**values)


def _check_schedule(schedule: dict[str, Any] | None, where: str) -> None:
    if schedule is None:
        return
    parameters = {k: v for k, v in schedule.items() if k not in ("kind", "units")}
    try:
        build(str(schedule.get("kind")), **parameters)
    except ValueError as error:
        raise RecipeError(
            f"{where}`schedule`: {error}",
            hint="for example `{kind: linear, peak: 0.003, end: 1000}`",
        ) from error
