"""What is registered, as text. Each list loads what it lists, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from qaudit.core.keys import nearest
from qaudit.errors import UsageError


def listing(kind: str, *, as_json: bool = False, quiet: bool = False) -> str:
    """Return the names of one kind of thing, each with its first line of description."""
    if kind not in _KINDS:
        raise UsageError(f"there is no list of `{kind}`", hint=nearest(kind, _KINDS))
    lines = _KINDS[kind]()
    if as_json:
        return json.dumps(lines, indent=1)
    if quiet:
        return "\n".join(lines)
    width = max(map(len, lines), default=0)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _schemes() -> dict[str, str]:
    from qaudit.core.registry import schemes

    return _classes(schemes())


def _merges() -> dict[str, str]:
    from qaudit.core.registry import merges

    return _classes(merges())


def _diagnostics() -> dict[str, str]:
    from qaudit.diagnostics.registry import diagnostics

    return _classes(diagnostics())


def _classes(registered: Mapping[str, type]) -> dict[str, str]:
    return {name: (c.__doc__ or "").partition("\n")[0] for name, c in registered.items()}


def _families() -> dict[str, str]:
    from qaudit.families import all_families

    return {family.family: family.description for family in all_families()}


def _recipes() -> dict[str, str]:
    from qaudit.recipe.table import shipped_recipes

    return shipped_recipes()


def _experiments() -> dict[str, str]:
    from qaudit.lab.experiments.table import shipped_experiments

    return shipped_experiments()


def _policies() -> dict[str, str]:
    from qaudit.policy import descriptions

    return descriptions()


def _rules() -> dict[str, str]:
    from qaudit.types.codes import CODES

    return {code: rule.title for code, rule in CODES.items()}


_KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "schemes": _schemes,
    "merges": _merges,
    "diagnostics": _diagnostics,
    "families": _families,
    "recipes": _recipes,
    "experiments": _experiments,
    "policies": _policies,
    "rules": _rules,
}
