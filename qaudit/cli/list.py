"""`qaudit list`: names of what is registered or ships. Each kind loads what it lists alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pkgutil import resolve_name
from typing import Annotated, Any

import typer

from qaudit.cli.options import AsJson, option
from qaudit.cli.terminal import print_result
from qaudit.errors import MachineError, UsageError
from qaudit.settings import OUTPUT, settings_of
from qaudit.support.keys import nearest


def list_(
    kind: Annotated[
        str,
        typer.Argument(
            help="schemes, sets, settings, formats, merges, diagnostics, families, recipes, "
            "policies, tasks, lm-eval (all of its tasks) or rules."
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
    rows = _KINDS[kind]()
    if as_json:
        return json.dumps(rows, indent=1)
    if quiet:
        return "\n".join(rows)
    lines = {name: _of_setting(row) if isinstance(row, dict) else row for name, row in rows.items()}
    from qaudit.report.terminal import hanging

    width = max(map(len, lines), default=0)
    if sys.stdout.isatty():
        return "\n".join(hanging(f"{name:<{width}}  ", text) for name, text in lines.items())
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _schemes() -> dict[str, str]:
    from qaudit.core.registry import schemes

    texts, broken = _classes("qaudit.core.registry:schemes"), schemes().broken()
    for name in schemes():
        if name not in broken:
            texts[name] = f"{texts[name]} {_parameters(schemes()[name])}".rstrip()
    return texts


def _parameters(plugin: Any) -> str:
    texts = [
        f.name if f.default is MISSING else f"{f.name}={str(f.default).lower()}"
        for f in fields(plugin)
        if f.name != "kv"  # of every scheme: docs/schemes.md
    ]
    return f"[{', '.join(texts)}]" if texts else ""


def _classes(registry: str) -> dict[str, str]:
    registered = resolve_name(registry)()
    broken = registered.broken()
    usable = {name: registered[name] for name in registered if name not in broken}
    return _described(usable, broken)


def _diagnostics() -> dict[str, str]:
    from qaudit.diagnostics.registry import broken, diagnostics

    return _described(diagnostics(), broken())


def _described(
    usable: Mapping[str, type[Any]], broken: Mapping[str, MachineError]
) -> dict[str, str]:
    """Return the first lines of docstrings, and why plug-ins of others cannot be used."""
    texts = {name: (kind.__doc__ or "").partition("\n")[0] for name, kind in usable.items()}
    return texts | {name: error.message for name, error in broken.items()}


def _shipped(name: str) -> Callable[[], dict[str, str]]:
    return lambda: resolve_name(name)()


def _sets() -> dict[str, str]:
    from qaudit.core.registry import scheme_sets

    return {name: ", ".join(texts) for name, texts in scheme_sets().items()}


def _families() -> dict[str, str]:
    from qaudit.families import all_families

    return {family.family: family.description for family in all_families()}


def _settings() -> dict[str, dict[str, str]]:
    return {
        name: {
            "help": entry.setting.help,
            "type": entry.kind,
            "default": entry.shown_default,
            "option": entry.option,
            "variable": entry.variable,
        }
        for name, entry in settings_of().items()
    }


def _of_setting(row: Mapping[str, str]) -> str:
    option = f"; {row['option']}" if row["option"] else ""
    return f"{row['help']} [{row['type']}; default: {row['default']}{option}]"


def _formats() -> dict[str, str]:
    from qaudit.formats.packing import FileFormat
    from qaudit.formats.registry import formats, further_readers, readers
    from qaudit.report import diff, folder, gate

    texts, built_in = _classes("qaudit.formats.registry:formats"), formats().built_in
    files = [name for name, form in built_in.items() if issubclass(form, FileFormat)]
    uses: dict[str, tuple[str, ...]] = {
        "export": tuple(formats()),
        "scan --shipped": (*readers(), *further_readers(), *files),
        "report": tuple(folder.FORMATS),
        "gate": tuple(gate.FORMATS),
        "diff": tuple(diff.FORMATS),
    }
    names = dict.fromkeys(name for group in uses.values() for name in group)
    used = {name: [use for use, group in uses.items() if name in group] for name in names}
    return {name: f"{texts.get(name, '')} [{', '.join(used[name])}]".strip() for name in names}


def _rules() -> dict[str, str]:
    from qaudit.types import CODES

    return {code: rule.title for code, rule in CODES.items()}


_KINDS: dict[str, Callable[[], Mapping[str, str | dict[str, str]]]] = {
    "schemes": _schemes,
    "sets": _sets,
    "settings": _settings,
    "formats": _formats,
    "merges": lambda: _classes("qaudit.core.registry:merges"),
    "diagnostics": _diagnostics,
    "families": _families,
    "recipes": _shipped("qaudit.recipe.table:shipped_recipes"),
    "policies": _shipped("qaudit.policy:descriptions"),
    "tasks": _shipped("qaudit.items.names:descriptions"),
    "lm-eval": _shipped("qaudit.items.harness:all_tasks"),
    "rules": _rules,
}
