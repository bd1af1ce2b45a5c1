"""A recipe: what a person asked for, from YAML or from options, checked key by key.

The keys of a recipe are the options of `qaudit scan` with underscores; an option given beside
a recipe takes the place of its key. Paths in a recipe are read from the working directory, as
they would be on the command line. Nothing is resolved here but soups, which are a text
(`A+B+C`, a glob, or `label=merge(A+B+C)`) or a table of `label`, `merge` and `of`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from qaudit import recipes_folder
from qaudit.core.keys import explain, nearest
from qaudit.core.registry import DEFAULT_SCHEMES, parse_merge
from qaudit.core.schedules import build
from qaudit.errors import RecipeError, UsageError
from qaudit.types import Checkpoint, Recipe, Subject

DEMO = "demo"


class _Soup(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: str
    merge: str = "mean"
    of: Annotated[list[str], Field(min_length=2)]

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


_Texts = Annotated[list[str], BeforeValidator(_as_list)]
_Soups = Annotated[list[Annotated[str, BeforeValidator(_soup_text)]], BeforeValidator(_as_list)]
_Count = Annotated[int, Field(strict=True, ge=1)]


class _Table(BaseModel):
    """The keys of a recipe, as they may stand in its file."""

    model_config = ConfigDict(extra="forbid")

    targets: Annotated[_Texts, Field(min_length=1)]
    schemes: _Texts = list(DEFAULT_SCHEMES)
    checkpoints: _Texts = []
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
    device: Annotated[str, AfterValidator(_device)] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    schedule: dict[str, Any] | None = None
    family: str | None = None
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
    path = recipes_folder() / "demo.yaml" if files == [DEMO] else Path(files[0])
    table = _read(path)
    _checked(table, f"`{path}`: ")
    return _checked({**table, **given, "targets": table["targets"]}, "")


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in a YAML file."""
    return _checked(_read(path), f"`{path}`: ")


def is_recipe(target: str) -> bool:
    """Say whether a target is a recipe's file, by its name."""
    return target.endswith((".yaml", ".yml"))


def _read(path: Path) -> dict[str, Any]:
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        near = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise RecipeError(f"there is no recipe `{path}`", hint=nearest(path.name, near)) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
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


# ------------------------------------------------------------------------- which, and which soups


def select(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that the recipe's globs name, or all if it names none."""
    if not recipe.checkpoints:
        return tuple(checkpoints)
    wanted = {c.label for glob in recipe.checkpoints for c in _matching(glob, checkpoints)}
    return tuple(c for c in checkpoints if c.label in wanted)


def needed(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that are measured or are part of a soup: no other has to be read."""
    wanted = {c.label for c in select(recipe, checkpoints)}
    wanted |= {c.label for soup in recipe.soups for c in _members(parse_soup(soup), checkpoints)}
    return tuple(c for c in checkpoints if c.label in wanted)


def resolve_soups(recipe: Recipe, checkpoints: Sequence[Checkpoint]) -> tuple[Subject, ...]:
    """Return the soups a recipe asks for, each of at least two different weights."""
    taken = {c.label for c in checkpoints}
    soups = []
    for text in recipe.soups:
        soup = parse_soup(text)
        members = _members(soup, checkpoints)
        _check_members(soup, members)
        if soup.label in taken:
            raise UsageError(
                f"two subjects are called `{soup.label}`",
                hint="call the soup something else: `label=mean(A+B)`",
            )
        taken.add(soup.label)
        share = 1 / len(members)
        merge = parse_merge(soup.merge).spec
        soups.append(Subject(soup.label, tuple((c, share) for c in members), merge))
    return tuple(soups)


@dataclass(frozen=True)
class SoupRequest:
    """A soup as it was asked for: names and globs, not yet checkpoints."""

    label: str
    merge: str
    of: tuple[str, ...]


def parse_soup(text: str) -> SoupRequest:
    """Read `A+B+C`, `stage2-*-step1000`, `mean(A+B)` or `label=mean(A+B)`."""
    match = re.fullmatch(
        r"(?:(?P<label>[^=()]+)=)?(?P<merge>[a-z][a-z0-9_:=.-]*)\((?P<of>.+)\)", text
    )
    of, merge = (match["of"], match["merge"]) if match else (text, "mean")
    parts = tuple(part.strip() for part in of.split("+"))
    if not all(parts):
        raise UsageError(f"`{text}` is not a soup", hint="write `A+B+C` or a glob of checkpoints")
    label = match["label"].strip() if match and match["label"] else f"{merge}({of})"
    return SoupRequest(label, merge, parts)


def _members(soup: SoupRequest, checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    return tuple(c for part in soup.of for c in _matching(part, checkpoints))


def _matching(glob: str, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoint of this name, or all that match it as a glob."""
    known = {c.label: c for c in checkpoints}
    if glob in known:
        return [known[glob]]
    found = [c for label, c in known.items() if fnmatchcase(label, glob)]
    if found:
        return found
    if any(sign in glob for sign in "*?["):
        raise UsageError(f"no checkpoint matches `{glob}`", hint=f"there are: {', '.join(known)}")
    raise UsageError(f"there is no checkpoint `{glob}`", hint=nearest(glob, known))


def _check_members(soup: SoupRequest, members: Sequence[Checkpoint]) -> None:
    if len(members) < 2:
        raise UsageError(
            f"soup `{soup.label}` has one member, `{members[0].label}`",
            hint="a soup needs two or more; a checkpoint by itself is measured anyway",
        )
    seen: dict[str, str] = {}
    for member in members:
        weights = member.content if member.files else member.label
        if weights in seen:
            raise UsageError(
                f"soup `{soup.label}` has the same weights twice: "
                f"`{seen[weights]}` and `{member.label}`",
                hint="leave one of them out; a soup would count it double",
            )
        seen[weights] = member.label
