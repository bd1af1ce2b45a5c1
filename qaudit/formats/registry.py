"""The formats that are read and written, by name. A module of this room is one by being here.

A format that is written is a `Format`, of this package or of another distribution by the entry
point `qaudit.formats`. One that is read is a `Reader`: a constant of a module here, the `reader` of
a format, or what the entry point of another distribution in `qaudit.readers` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import PurePath

import qaudit.formats
from qaudit.core.registry import discover, modules_in
from qaudit.core.scheme import NO_CACHE, Scheme
from qaudit.errors import MachineError, SchemeError, UsageError
from qaudit.formats.packing import FileFormat, Format
from qaudit.formats.reading import Reader
from qaudit.support.plugins import Plugins, entries_of, imported, plugin_at


@cache
def formats() -> Plugins[Format]:
    return Plugins("format", Format, discover(qaudit.formats, Format))


@cache
def readers() -> Mapping[str, Reader]:
    values = [value for module in modules_in(qaudit.formats) for value in vars(module).values()]
    kinds = [value for value in values if isinstance(value, type) and issubclass(value, Format)]
    found = [*values, *(vars(kind).get("reader") for kind in kinds)]
    return {reader.name: reader for reader in found if isinstance(reader, Reader)}


def reader_named(name: str) -> Reader | None:
    """Return a reader; that of another distribution is imported where a file names its format."""
    if (entry := further_readers().get(name)) is not None:
        with imported("reader", entry):
            reader = entry.load()
        if not isinstance(reader, Reader) or reader.name != name:
            origin = plugin_at("reader", entry)
            raise MachineError(
                f"`{entry.value}` of {origin} is no Reader named `{name}`",
                hint=f"install another version of it, or `pip uninstall {origin.distribution}`",
            )
        return reader
    if name in readers() or name not in formats().entries:
        return readers().get(name)
    return getattr(formats()[name], "reader", None)


def further_readers() -> Mapping[str, EntryPoint]:
    """Return the readers of other distributions."""
    return entries_of("reader", tuple(readers()))


def file_format(place: PurePath | str) -> type[FileFormat] | None:
    """Return the format of a single file by its ending; None for a folder."""
    built_in = formats().built_in.values()
    endings = {form.ending: form for form in built_in if issubclass(form, FileFormat)}
    return endings.get(PurePath(place).suffix.lower())


def has_embeddings(name: str) -> bool:
    return name in formats() and formats()[name].has_embeddings


def format_named(name: str, scheme: Scheme) -> Format:
    if name not in formats():
        raise UsageError(
            f"`{name}` is not a format that is written", hint=f"use {' or '.join(formats())}"
        )
    if scheme.kv != NO_CACHE:
        alone = replace(scheme, kv=NO_CACHE).short
        raise SchemeError(
            f"`{scheme.short}` rounds cached keys and values, which no file of weights holds",
            hint=f"export {alone}, and have the runtime round its cache",
        )
    return formats()[name](scheme)
