"""A YAML file and the `--set key=value` laid over it, with the line of everything in it.

A wrong key or value is refused by the line it is on, or by the `--set` it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from qaudit.errors import RecipeError
from qaudit.support.foreign import Place, lines_of, nearest_line, yaml_file, yaml_of
from qaudit.support.keys import explain, first

STRICT = ConfigDict(extra="forbid")
T = TypeVar("T")


@dataclass
class LabDocument:
    """A table of keys, and where each of its values was written."""

    table: dict[str, Any] = field(default_factory=dict)
    name: str = ""  # of the file
    lines: Mapping[Place, int] = field(default_factory=dict)
    settings: dict[Place, str] = field(default_factory=dict)  # by `--set`, as it was written

    def refuse(self, sentence: str, hint: str, place: Place = ()) -> RecipeError:
        """Return the error for a value, with the line or the option that it was written in."""
        for setting, text in self.settings.items():
            if place[: len(setting)] == setting or (place and setting[: len(place)] == place):
                return RecipeError(f"`--set {text}`: {sentence}", hint=hint)
        line = nearest_line(self.lines, place) if place else 0
        where = f"`{self.name}`{f', line {line}' if line else ''}: " if self.name else ""
        return RecipeError(where + sentence, hint=hint)

    def check(self, kind: type[T], table: Mapping[str, Any], at: Place = ()) -> T:
        """Build a value of a pydantic type from the table at a place of this document."""
        try:
            return TypeAdapter(kind).validate_python(dict(table))
        except ValidationError as error:
            errors = [{**detail, "loc": (*at, *detail["loc"])} for detail in error.errors()]
            sentence, hint = explain(errors, _allowed(kind, at))
            place = tuple(first(errors)["loc"])
            raise self.refuse(sentence.removeprefix("all of it: "), hint, place) from error


def _allowed(kind: Any, at: Place) -> dict[str, Sequence[str]]:
    """Return the keys of a table and of those inside it, as `explain` looks them up."""
    keys: dict[str, Sequence[str]] = {}

    def collect(name: str, annotation: Any) -> None:
        for inner in getattr(annotation, "__args__", ()):
            collect(name, inner)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            names = {f.alias or n: f.annotation for n, f in annotation.model_fields.items()}
        elif is_dataclass(annotation):
            names = {f.name: None for f in fields(annotation)}
        else:
            return
        keys[name] = list(names)
        for key, inner in names.items():
            collect(key, inner)

    collect(str(at[-1]) if at else "", kind)
    return keys


def read_document(path: Path, what: str, settings: Sequence[str] = ()) -> LabDocument:
    """Read a YAML file that holds a table of keys, and lay settings over it."""
    table, node = yaml_file(path)
    if not isinstance(table, dict):
        raise RecipeError(f"`{path}` is not {what}", hint="it must be a table of keys")
    document = LabDocument(table, str(path), lines_of(node))
    lay_over(document, settings)
    return document


def lay_over(document: LabDocument, settings: Sequence[str]) -> None:
    """Set values in a document: `model.layers=2`; a value is read as YAML."""
    for text in settings:
        key, equals, value = text.partition("=")
        place = tuple(key.split("."))
        if not equals or not all(place):
            raise RecipeError(f"`--set {text}` sets nothing", hint="write `--set model.layers=2`")
        table = document.table
        for part in place[:-1]:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                raise RecipeError(
                    f"`--set {text}`: `{part}` is `{inner}`", hint="only tables have keys"
                )
            table[part] = table = dict(inner)  # a copy: aliases share their tables
        try:
            table[place[-1]] = yaml_of(value)
        except ValueError as error:
            reason = str(error).rpartition(": ")[2]  # without its line: there is only one
            raise RecipeError(
                f"`--set {text}`: {reason}", hint="write the value as YAML"
            ) from error
        document.settings[place] = text
