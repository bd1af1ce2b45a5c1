"""`qaudit list`: names of what is registered or ships. Each kind loads what it lists alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer

from qaudit.cli.options import AsJson, option
from qaudit.cli.terminal import print_result
from qaudit.core.keys import nearest
from qaudit.errors import UsageError
from qaudit.settings import OUTPUT


def list_(
    kind: Annotated[
        str,
        typer.Argument(
            help="schemes, sets, merges, diagnostics, families, recipes, experiments, policies, "
            "tasks, lm-eval (all of its tasks) or rules."
        ),
    ] = "schemes",
    as_json: AsJson = False,
    quiet: Annotated[bool, option(OUTPUT, "Only names, one a line.", "--quiet", "-q")] = False,
) -> int:
    """List what is registered, one a line, with its description.

    Example: qaudit list schemes
    """
    print_result(listing(kind, as_json=as_json, quiet=quiet))
    return 0


def listing(kind: str, *, as_json: bool = False, quiet: bool = False) -> str:
    """Return the names of one kind, each with the first line of its description."""
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

    texts = _classes(schemes())
    return {name: f"{texts[name]} {_parameters(c)}".rstrip() for name, c in schemes().items()}


def _sets() -> dict[str, str]:
    from qaudit.core.registry import scheme_sets

    return {name: ", ".join(texts) for name, texts in scheme_sets().items()}


def _parameters(plugin: Any) -> str:
    """Return the parameters of a plug-in with their defaults, as they are written."""
    texts = [
        f.name if f.default is MISSING else f"{f.name}={str(f.default).lower()}"
        for f in fields(plugin)
        if f.name != "kv"  # of every scheme: docs/schemes.md
    ]
    return f"[{', '.join(texts)}]" if texts else ""


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


def _tasks() -> dict[str, str]:
    from qaudit.items.names import descriptions

    return descriptions()


def _lm_eval() -> dict[str, str]:
    from qaudit.items.harness import all_tasks

    return all_tasks()


def _rules() -> dict[str, str]:
    from qaudit.types import CODES

    return {code: rule.title for code, rule in CODES.items()}


_KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "schemes": _schemes,
    "sets": _sets,
    "merges": _merges,
    "diagnostics": _diagnostics,
    "families": _families,
    "recipes": _recipes,
    "experiments": _experiments,
    "policies": _policies,
    "tasks": _tasks,
    "lm-eval": _lm_eval,
    "rules": _rules,
}
