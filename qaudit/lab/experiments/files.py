"""Files of experiments, shipped or one's own, laid over what they share, and checked.

`common.yaml` holds the sizes and the run that most experiments start from; it lies beside an
experiment's file, or the shipped one is taken. An experiment may change single keys of a size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from qaudit import recipes_folder
from qaudit.core.foreign import yaml_of
from qaudit.core.keys import explain, nearest
from qaudit.errors import RecipeError
from qaudit.lab.experiments.table import (
    SIZES,
    ClaimTable,
    Common,
    ContrastTable,
    Experiment,
    RunTable,
    Size,
    SoupTable,
    Table,
)

COMMON = "common.yaml"
T = TypeVar("T", bound=Table)


def experiments_folder() -> Path:
    """Return the folder of experiments that ship with this installation."""
    return recipes_folder() / "lab"


def shipped_experiments() -> dict[str, str]:
    """Return every experiment that ships, with its description."""
    paths = sorted(p for p in experiments_folder().glob("*.yaml") if p.name != COMMON)
    return {path.stem: str(_read(path).get("description", "")) for path in paths}


def read_experiment(name: str) -> Experiment:
    """Return a shipped experiment by its name, or one in a file beside a `common.yaml`."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else experiments_folder() / f"{name}.yaml"
    if not path.is_file():
        raise RecipeError(
            f"there is no experiment `{name}`", hint=nearest(path.stem, shipped_experiments())
        )
    common_path = path.parent / COMMON
    if not common_path.is_file():
        common_path = experiments_folder() / COMMON
    common = _checked(Common, _read(common_path), common_path)
    return _checked(Experiment, _laid_over(common, _read(path), path), path)


def _laid_over(common: Common, table: dict[str, Any], path: Path) -> dict[str, Any]:
    """Lay an experiment over what it shares: its runs follow, its sizes change single keys."""
    over = table.get("sizes", {})
    own = table.get("runs", [])
    if not isinstance(over, dict) or not isinstance(own, list):
        return table  # refused by name when it is checked
    if unknown := sorted(set(over) - set(common.sizes)):
        raise RecipeError(
            f"`{path}`: there is no size `{unknown[0]}`", hint=nearest(unknown[0], common.sizes)
        )
    sizes = {
        name: {**size.model_dump(), **_table(over.get(name), path, name)}
        for name, size in common.sizes.items()
    }
    runs = [run.model_dump(by_alias=True) for run in common.runs]
    return {"name": path.stem, **table, "sizes": sizes, "runs": [*runs, *own]}


def _table(value: object, path: Path, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecipeError(f"`{path}`: `sizes.{name}` is `{value}`", hint="it must be a table")
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        table = yaml_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"`{path}` cannot be read: {reason}", hint="write it as YAML") from error
    if not isinstance(table, dict):
        raise RecipeError(f"`{path}` is not an experiment", hint="it is a table of keys")
    return table


def _checked(kind: type[T], table: dict[str, Any], path: Path) -> T:
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        sentence, hint = explain(error.errors(), _ALLOWED)
        said = sentence.removeprefix("all of it: ")
        raise RecipeError(f"`{path}`: {said}", hint=hint) from error


_ALLOWED = {
    "": list(Experiment.model_fields),
    "sizes": list(Size.model_fields),
    "runs": [field.alias or name for name, field in RunTable.model_fields.items()],
    "soups": list(SoupTable.model_fields),
    "claims": list(ClaimTable.model_fields),
    "contrasts": list(ContrastTable.model_fields),
} | {name: list(Size.model_fields) for name in SIZES}
