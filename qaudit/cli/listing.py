"""What is registered, as text."""

from __future__ import annotations

from collections.abc import Mapping

from qaudit.core.registry import diagnostics, merges, schemes
from qaudit.errors import UsageError
from qaudit.families import all_families
from qaudit.lab.experiments.files import shipped_experiments
from qaudit.policy import descriptions
from qaudit.recipe.table import shipped_recipes
from qaudit.types.codes import CODES


def listing(kind: str) -> str:
    """Return the names of one kind of thing, each with its first line of description."""
    kinds = {
        "schemes": _classes(schemes()),
        "merges": _classes(merges()),
        "diagnostics": _classes(diagnostics()),
        "families": _families(),
        "recipes": shipped_recipes(),
        "experiments": shipped_experiments(),
        "policies": descriptions(),
        "rules": {code: rule.title for code, rule in CODES.items()},
    }
    if kind not in kinds:
        raise UsageError(f"there is no list of `{kind}`", hint=f"one of {', '.join(kinds)}")
    lines = kinds[kind]
    width = max(map(len, lines), default=0)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _classes(registered: Mapping[str, type]) -> dict[str, str]:
    return {name: (c.__doc__ or "").partition("\n")[0] for name, c in registered.items()}


def _families() -> dict[str, str]:
    return {family.family: family.description for family in all_families()}
