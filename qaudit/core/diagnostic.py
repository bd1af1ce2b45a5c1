"""What a diagnostic is: a frozen dataclass that says what is asked of one subject's weights.

Its fields are its parameters, its docstring's first line its description, `version` part of
the key under which its results are kept. A file dropped into `core/diagnostics/` is registered
by being there (`core/registry.py`). Unlike a scheme it has no verb here: it needs a model, text
and a machine, and those belong to the engine (`engine/diagnosing/`), which has one function for
each diagnostic. What is pure of it, the numerics, lies beside the dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """Base of every diagnostic."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}

    @property
    def short(self) -> str:
        """Return the display name: its name, and behind it whatever is not default."""
        changed = [f for f in _in_order(self) if getattr(self, f.name) != f.default]
        return ":".join([self.name, *(self._pair(f) for f in changed)])

    @property
    def spec(self) -> str:
        """Return the canonical form, every parameter spelled out."""
        return ":".join([self.name, *(self._pair(f) for f in _in_order(self))])

    def _pair(self, field: Field[Any]) -> str:
        value = getattr(self, field.name)
        return f"{field.name}={str(value).lower() if isinstance(value, bool) else value}"


def _in_order(diagnostic: Diagnostic) -> list[Field[Any]]:
    """Return the parameters, a scheme last: written in full it holds colons itself."""
    return sorted(fields(diagnostic), key=lambda field: field.name == "scheme")
