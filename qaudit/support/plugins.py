"""Schemes, merges, formats and diagnostics of other distributions, by entry points.

    [project.entry-points."qaudit.schemes"]
    ternary = "qaudit_ternary:Ternary"

An entry point has the name of its plug-in. Names are read from metadata, and a module is imported
when its plug-in is used: what judges a saved audit imports none. Two plug-ins of one name are
refused, because nothing says which of them measured what is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from qaudit.errors import MachineError, QauditError, UsageError
from qaudit.types import Plugin, PluginKind
from qaudit.version import __version__

P = TypeVar("P")


class Plugins(Mapping[str, type[P]], Generic[P]):
    """Plug-ins of a kind by name: those that are built in, and of others those that are used."""

    def __init__(self, kind: PluginKind, base: type[P], built_in: Mapping[str, type[P]]) -> None:
        self.kind, self.built_in, self._base = kind, MappingProxyType(dict(built_in)), base

    @property
    def entries(self) -> Mapping[str, EntryPoint]:
        return entries_of(self.kind, tuple(self.built_in))

    def __getitem__(self, name: str) -> type[P]:
        if name in self.entries:
            plugin: type[P] = loaded(self.kind, self.entries[name], self._base)
            return plugin
        return self.built_in[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        yield from self.entries

    def __len__(self) -> int:
        return len(self.built_in) + len(self.entries)

    def broken(self) -> dict[str, MachineError]:
        """Return why plug-ins of other distributions cannot be used, by name."""
        errors = {}
        for name in self.entries:
            try:
                self[name]
            except MachineError as error:
                errors[name] = error
        return errors

    def origin(self, name: str) -> Plugin | None:
        """Return the distribution that a plug-in is of; None for one that is built in."""
        return plugin_at(self.kind, self.entries[name]) if name in self.entries else None


def loaded(kind: PluginKind, entry: EntryPoint, base: type[Any]) -> Any:
    """Import a plug-in: a value of the base for readers, a class below it for all others."""
    with imported(kind, entry):
        plugin = entry.load()
    is_class = isinstance(plugin, type)
    fits = isinstance(plugin, base) if kind == "reader" else is_class and issubclass(plugin, base)
    if fits and getattr(plugin, "name", "") == entry.name:
        return plugin
    origin = plugin_at(kind, entry)
    raise MachineError(
        f"`{entry.value}` of {origin} is no {base.__name__} named `{entry.name}`",
        hint=f"install another version of it, or `pip uninstall {origin.distribution}`",
    )


@cache
def entries_of(kind: PluginKind, built_in: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    origins = dict.fromkeys(built_in, f"qaudit-llm {__version__}")
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"qaudit.{kind}s"):
        origin = plugin_at(kind, entry)
        if entry.name in origins:
            raise UsageError(
                f"two distributions have a {kind} `{entry.name}`: {origins[entry.name]} and "
                f"{origin}",
                hint=f"uninstall one: `pip uninstall {origin.distribution}`",
            )
        origins[entry.name], entries[entry.name] = str(origin), entry
    return entries


def plugin_at(kind: PluginKind, entry: EntryPoint) -> Plugin:
    if entry.dist is None:
        return Plugin(kind, entry.name, entry.module, "")
    return Plugin(kind, entry.name, entry.dist.name, entry.dist.version)


@contextmanager
def imported(kind: PluginKind, entry: EntryPoint) -> Iterator[None]:
    """Report what modules of another distribution raise while they are imported."""
    try:
        yield
    except QauditError:
        raise
    except (Exception, SystemExit) as error:  # a module of others may raise anything
        origin = plugin_at(kind, entry)
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, SystemExit):
            reason = f"it ends the process with exit code {error.code or 0}"
        raise MachineError(
            f"the {kind} `{entry.name}` of {origin} cannot be imported: {reason}",
            hint=f"install another version of it, or `pip uninstall {origin.distribution}`",
        ) from error
