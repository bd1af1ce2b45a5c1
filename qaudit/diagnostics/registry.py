"""Find diagnostics and their parts by name. Nothing here imports torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from types import ModuleType

import qaudit.diagnostics
from qaudit.core.registry import build, plugins_in, read_pairs, unknown
from qaudit.diagnostics.diagnostic import Diagnostic
from qaudit.errors import MachineError, SchemeError
from qaudit.support.plugins import entries_of, imported, plugin_at
from qaudit.types import Plugin

ALL = "all"
"""Every diagnostic, each with its default parameters."""


@cache
def packages() -> tuple[str, ...]:
    """Return the packages: those that can be requested first, then those always computed."""
    names = [*_built_in(), *(name for name in entries() if name not in broken())]
    return tuple(sorted(names, key=lambda name: part(name, "parameters") is None))


@cache
def _built_in() -> tuple[str, ...]:
    modules = pkgutil.iter_modules(qaudit.diagnostics.__path__)
    return tuple(sorted(module.name for module in modules if module.ispkg))


def entries() -> Mapping[str, EntryPoint]:
    """Return the packages of other distributions, by the name of their diagnostic."""
    return entries_of("diagnostic", _built_in())


@cache
def broken() -> Mapping[str, MachineError]:
    """Return why diagnostics of other distributions cannot be imported, by name."""
    errors = {}
    for name in entries():
        try:
            part(name, "parameters")
        except MachineError as error:
            errors[name] = error
    return errors


def part(package: str, name: str) -> ModuleType | None:
    """Import one part of a diagnostic; None if the package has no such part."""
    entry = entries().get(package)
    if entry is None:
        return _built_in_part(package, name)
    with imported("diagnostic", entry):
        return _imported(f"{entry.value}.{name}")


@cache
def _built_in_part(package: str, name: str) -> ModuleType | None:
    return _imported(f"{qaudit.diagnostics.__name__}.{package}.{name}")


def _imported(path: str) -> ModuleType | None:
    return None if find_spec(path) is None else importlib.import_module(path)


def parts(name: str) -> Iterator[ModuleType]:
    """Import one part of every diagnostic that has it."""
    modules = (part(package, name) for package in packages())
    return (module for module in modules if module is not None)


def judges(texts: Iterable[str]) -> Iterator[ModuleType]:
    """Import the judges of the diagnostics that are requested, and of those that always are."""
    requested = {diagnostic.name for diagnostic in parse_diagnostics(texts)}
    for package in packages():
        module = part(package, "judge")
        if module is not None and (package in requested or part(package, "parameters") is None):
            yield module


def diagnostics() -> dict[str, type[Diagnostic]]:
    return dict(_diagnostics())


@cache
def _diagnostics() -> dict[str, type[Diagnostic]]:
    return {k: v for m in parts("parameters") for k, v in plugins_in(m, Diagnostic).items()}


def origin(name: str) -> Plugin | None:
    """Return the distribution that a diagnostic is of; None for one that is built in."""
    return plugin_at("diagnostic", entries()[name]) if name in entries() else None


def origins_of(texts: Iterable[str]) -> tuple[Plugin, ...]:
    plugins = [origin(diagnostic.name) for diagnostic in parse_diagnostics(texts)]
    return tuple(plugin for plugin in plugins if plugin is not None)


def parse_diagnostics(texts: Iterable[str]) -> tuple[Diagnostic, ...]:
    """Parse lists of diagnostics separated by commas; `all` is every one with its defaults."""
    parsed: dict[str, Diagnostic] = {}
    for text in ",".join(texts).split(","):
        if text.strip() == ALL:
            parsed |= {name: kind() for name, kind in diagnostics().items() if name not in parsed}
        elif text.strip():
            diagnostic = _parse(text.strip())
            if parsed.get(diagnostic.name, diagnostic) not in (diagnostic, type(diagnostic)()):
                raise SchemeError(f"`{diagnostic.name}` is requested twice", hint="request it once")
            parsed[diagnostic.name] = diagnostic
    return tuple(parsed.values())


def _parse(text: str) -> Diagnostic:
    """Parse one diagnostic; a scheme among its parameters comes last."""
    head, named, scheme = text.partition(":scheme=")
    name, *pairs = head.split(":")
    if name in broken():
        raise broken()[name]
    if name not in diagnostics():
        raise unknown("diagnostic", name, [*diagnostics(), ALL], diagnostics())
    explicit = read_pairs(pairs) | ({"scheme": scheme} if named else {})
    return build(diagnostics()[name], name, explicit)
