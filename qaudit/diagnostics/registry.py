"""Find diagnostics and their parts by name. Nothing here imports torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import qaudit.diagnostics
from qaudit.core.registry import build, plugins_in, read_pairs, unknown
from qaudit.diagnostics.diagnostic import Diagnostic
from qaudit.errors import MachineError, SchemeError
from qaudit.support.plugins import entries_of, imported, plugin_at
from qaudit.types import Plugin

ALL = "all"
"""Every diagnostic, each with its default parameters."""


_MACHINERY = frozenset({"case", "diagnostic", "registry"})


@cache
def names() -> tuple[str, ...]:
    """Return the names: those that can be requested first, then those always computed."""
    listed = [*_built_in(), *(name for name in entries() if name not in broken())]
    return tuple(sorted(listed, key=lambda name: not is_requested(name)))


@cache
def _built_in() -> tuple[str, ...]:
    """Return the modules here that are diagnostics: of `NAME_measure` the part before is one."""
    modules = (module.name for module in pkgutil.iter_modules(qaudit.diagnostics.__path__))
    return tuple(sorted(name for name in modules if name not in _MACHINERY and "_" not in name))


def entries() -> Mapping[str, EntryPoint]:
    """Return the modules of other distributions, by the name of their diagnostic."""
    return entries_of("diagnostic", _built_in())


@cache
def broken() -> Mapping[str, MachineError]:
    """Return why diagnostics of other distributions cannot be imported, by name."""
    errors = {}
    for name in entries():
        try:
            module(name)
        except MachineError as error:
            errors[name] = error
    return errors


def module(name: str, part: str = "") -> ModuleType:
    """Import a diagnostic, or a part of it."""
    entry = entries().get(name)
    with imported("diagnostic", entry) if entry else nullcontext():
        place = entry.value if entry else f"qaudit.diagnostics.{name}"
        return importlib.import_module(f"{place}{part}")


def measure(name: str) -> ModuleType:
    """Import what measures a diagnostic; those computed from measurements have no such module."""
    return module(name, "_measure")


def is_requested(name: str) -> bool:
    """Return whether a diagnostic has parameters; another is computed for every audit."""
    return bool(plugins_in(module(name), Diagnostic))


def parts(part: str) -> Iterator[Any]:
    """Yield one part of every diagnostic that has it: `section` or `FIGURE`."""
    for name in names():
        if (value := getattr(module(name), part, None)) is not None:
            yield value


def judges(texts: Iterable[str]) -> Iterator[ModuleType]:
    """Import the judges of the diagnostics that are requested, and of those that always are."""
    requested = {diagnostic.name for diagnostic in parse_diagnostics(texts)}
    for name in names():
        if hasattr(module(name), "judge") and (name in requested or not is_requested(name)):
            yield module(name)


@cache
def diagnostics() -> Mapping[str, type[Diagnostic]]:
    return {k: v for name in names() for k, v in plugins_in(module(name), Diagnostic).items()}


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
            # A scheme among the parameters comes last: it has colons itself.
            head, named, scheme = text.strip().partition(":scheme=")
            name, *pairs = head.split(":")
            if name in broken():
                raise broken()[name]
            if name not in diagnostics():
                raise unknown("diagnostic", name, [*diagnostics(), ALL], diagnostics())
            explicit = read_pairs(pairs) | ({"scheme": scheme} if named else {})
            diagnostic = build(diagnostics()[name], name, explicit)
            if parsed.get(diagnostic.name, diagnostic) not in (diagnostic, type(diagnostic)()):
                raise SchemeError(f"`{diagnostic.name}` is requested twice", hint="request it once")
            parsed[diagnostic.name] = diagnostic
    return tuple(parsed.values())
