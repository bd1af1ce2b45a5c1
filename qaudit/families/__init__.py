"""A family's YAML: names of checkpoints -> stage, step, tokens and learning rate.

Weights contain neither the step of a run nor its learning rate. The file of a family
has how its revisions are named, what a step is in tokens, and which schedule its trainer ran,
as the trainer's code or paper states it. Whatever is inferred is marked `verified: false` with
the reason and repeated wherever it is used; an unpublished schedule is left out, and the
learning rate then stays unknown.

One file may hold several sizes of one run as `variants`, each a table laid over the rest of the
file: tables merge, stages merge by name, lists go on, anything else is replaced.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qaudit.errors import RecipeError, UsageError
from qaudit.families.family import (
    Duplicates,
    Family,
    FamilySoup,
    Index,
    KnownBad,
    LearningRate,
    Match,
    Named,
    Ramp,
    Stage,
    compiled,
)
from qaudit.support.foreign import yaml_file
from qaudit.support.keys import explain, nearest

__all__ = ["FAMILY_FILE", "Family", "all_families", "families_in", "find", "learning_rate_of"]
__all__ += ["load", "load_file"]

FAMILY_FILE = "qaudit-family.yaml"
"""The name of a family's file in a folder of checkpoints."""


def load(name: str) -> Family:
    for family in all_families():
        if family.family == name:
            return family
    names = [family.family for family in all_families()]
    raise UsageError(f"there is no family `{name}`", hint=nearest(name, names))


@cache
def all_families() -> tuple[Family, ...]:
    folder = Path(str(files("qaudit.families")))
    return tuple(family for path in sorted(folder.glob("*.yaml")) for family in families_in(path))


def find(repo: str) -> Family | None:
    """Return the family of a repository, with the parameters in its name, or None."""
    matching = (f for f in all_families() if any(fnmatchcase(repo, g) for g in f.match.repos))
    if (family := next(matching, None)) is None:
        return None
    matches = [match for read in family.match.reads if (match := compiled(read).search(repo))]
    named = {key: text for match in matches for key, text in match.groupdict().items()}
    if not named:
        return family
    stages = []
    for stage in family.stages:
        rates = (LearningRate.model_validate({**lr.model_dump(), **named}) for lr in stage.lr)
        stages.append(stage.model_copy(update={"lr": tuple(rates)}))
    return family.model_copy(update={"stages": tuple(stages)})


def load_file(path: Path) -> Family:
    """Read a file that holds one family; a wrong key is named with the one probably meant."""
    families = families_in(path)
    if len(families) != 1:
        raise RecipeError(
            f"`{path}` holds {len(families)} families, and one is needed here",
            hint="leave one: " + ", ".join(f"`{family.family}`" for family in families),
        )
    return families[0]


def families_in(path: Path) -> tuple[Family, ...]:
    table, _ = yaml_file(path)
    if not isinstance(table, dict) or "variants" not in table:
        return (_validated(table, f"`{path}`"),)
    base = {key: value for key, value in table.items() if key != "variants"}
    variants = table["variants"]
    if not isinstance(variants, list) or not all(isinstance(v, dict) for v in variants):
        raise RecipeError(f"`{path}`: `variants` must be a list of tables", hint="see the others")
    return tuple(
        _validated(_laid_over(base, v), f"`{path}`, `{v.get('family', f'variants[{n}]')}`")
        for n, v in enumerate(variants)
    )


def _validated(table: object, where: str) -> Family:
    try:
        return Family.model_validate(table)
    except ValidationError as error:
        sentence, hint = explain(error.errors(), _ALLOWED)
        raise RecipeError(f"{where}: {sentence}", hint=hint) from error


def _laid_over(base: Any, variant: Any) -> Any:
    if isinstance(base, dict) and isinstance(variant, dict):
        both = {key: _laid_over(base[key], variant[key]) for key in base.keys() & variant.keys()}
        return {**base, **variant, **both}
    if isinstance(base, list) and isinstance(variant, list):
        over = {name: row for row in variant if (name := _name(row))}
        merged = [_laid_over(row, over.get(_name(row), row)) for row in base]
        names = {_name(row) for row in base}
        return merged + [row for row in variant if not _name(row) or _name(row) not in names]
    return variant


def _name(row: object) -> str:
    return str(row.get("name") or "") if isinstance(row, dict) else ""


def learning_rate_of(table: dict[str, Any]) -> LearningRate:
    try:
        return LearningRate.model_validate(table)
    except ValidationError as error:
        sentence, hint = explain(error.errors(), {"": list(LearningRate.model_fields)})
        raise RecipeError(f"schedule: {sentence}", hint=hint) from error


_ALLOWED = {
    "": [*Family.model_fields, "variants"],
    "match": list(Match.model_fields),
    "stages": list(Stage.model_fields),
    "lr": list(LearningRate.model_fields),
    "index": list(Index.model_fields),
    "tokens_per_step": list(Ramp.model_fields),
    "named": list(Named.model_fields),
    "soups": list(FamilySoup.model_fields),
    "known_duplicates": list(Duplicates.model_fields),
    "known_bad": list(KnownBad.model_fields),
}
