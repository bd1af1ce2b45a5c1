"""Plain JSON values into frozen dataclasses, by their type hints, with a path in every refusal.

Only the shapes that `qaudit.types` uses are known: numbers, text, `X | None`, `tuple[X, ...]`,
fixed tuples, literals, nested dataclasses, dictionaries and `Any`. Keys that no field has are
ignored, so that a newer audit of the same version can be read.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from qaudit.errors import AuditError

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """An object of the audit, and where it stands."""

    values: dict[str, Any]
    where: str

    def path(self, name: str) -> str:
        """Name a value by where it stands."""
        return f"{self.where}.{name}"

    def value(self, name: str) -> Any:
        """Return a value that must be there."""
        if name not in self.values:
            raise AuditError(f"`{self.path(name)}` is missing", hint=EDITED)
        return self.values[name]

    def text(self, name: str) -> str:
        """Return a text that must be there."""
        return cast(str, decode(self.value(name), str, self.path(name)))

    def row(self, name: str) -> Row:
        """Return an object inside this one."""
        return Row(_expect(self.value(name), dict, self.path(name)), self.path(name))

    def rows(self, name: str) -> list[Row]:
        """Return the objects of a list inside this one."""
        found = _expect(self.value(name), list, self.path(name))
        paths = [f"{self.path(name)}[{k}]" for k in range(len(found))]
        return [Row(_expect(v, dict, p), p) for v, p in zip(found, paths, strict=True)]

    def build(self, kind: type[T], known: Mapping[str, Any] | None = None) -> T:
        """Build a dataclass from `known` fields and, for the others, this row's values."""
        given = dict(known or {})
        hints = get_type_hints(kind)
        for field in fields(kind):  # type: ignore[arg-type]
            optional = field.default is not MISSING or field.default_factory is not MISSING
            if field.name in given or (optional and field.name not in self.values):
                continue
            value = self.value(field.name)
            given[field.name] = decode(value, hints[field.name], self.path(field.name))
        return kind(**given)


_LARGEST = 2**1000  # Python's whole numbers have no end, and its other numbers have one

EDITED = "the audit may be damaged or edited by hand: run the same scan again"


def decode(value: Any, kind: Any, where: str) -> Any:
    """Return `value` as the type `kind`, or refuse it by the name of its place."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        wanted = [k for k in inner if k is not type(None)]
        return None if value is None else decode(value, wanted[0], where)
    if origin is Literal:
        if value not in inner:
            raise AuditError(f"`{where}` is none of {', '.join(map(str, inner))}", hint=EDITED)
        return value
    if origin is tuple:
        return _tuple(_expect(value, list, where), inner, where)
    if origin is dict:
        return dict(_expect(value, dict, where))
    if is_dataclass(kind):
        return Row(_expect(value, dict, where), where).build(cast(type, kind))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > _LARGEST:
            raise AuditError(f"`{where}` is too large for a number", hint=EDITED)
        return float(value)
    return _expect(value, kind, where)


def _tuple(values: list[Any], inner: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    kinds = [inner[0]] * len(values) if inner[-1] is Ellipsis else list(inner)
    if len(kinds) != len(values):
        raise AuditError(f"`{where}` has {len(values)} entries, not {len(kinds)}", hint=EDITED)
    pairs = enumerate(zip(values, kinds, strict=True))
    return tuple(decode(value, kind, f"{where}[{k}]") for k, (value, kind) in pairs)


def _expect(value: Any, kind: type[T], where: str) -> T:
    wrong = isinstance(value, bool) and kind is not bool
    if wrong or not isinstance(value, kind):
        names = {dict: "an object", list: "a list", str: "text", float: "a number", int: "a number"}
        raise AuditError(f"`{where}` is not {names.get(kind, kind.__name__)}", hint=EDITED)
    return value
