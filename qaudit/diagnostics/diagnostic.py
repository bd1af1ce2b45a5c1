"""The parameters of a diagnostic: a frozen dataclass, parsed from the key `diagnostics`; roles.

The fields are the parameters, the first line of the docstring is the description, and `version`
is part of the key under which results are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar

from qaudit.core.scheme import Scheme
from qaudit.errors import SchemeError


@dataclass(frozen=True)
class DiagnosticWork:
    """What a diagnostic adds to a plan, for each subject."""

    text: str  # a line of the plan
    streams: int = 0  # models that are evaluated side by side
    passes: int = 0
    documents: int | None = None  # of the evaluation text; None: all
    schemes: tuple[Scheme, ...] = ()  # that quantize once more
    watches: bool = False  # reads what the pass itself quantizes


@dataclass(frozen=True)
class DiagnosticFigure:
    """A figure of a diagnostic: its name and title, whether an audit has it, and how it is drawn.

    Both functions take a view of the audit; `draw` returns a chart.
    """

    name: str
    alt: str
    is_drawn: Callable[[Any], bool]
    draw: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """Base of every diagnostic."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    reads_weights: ClassVar[bool] = True
    """Whether it has a `measure` part; the others are computed from measurements."""
    reads_previous: ClassVar[bool] = False
    """Whether the checkpoint before changes the result."""

    @property
    def short(self) -> str:
        """The display name: the name and every parameter that is not the default."""
        changed = [f for f in _in_order(self) if getattr(self, f.name) != f.default]
        return ":".join([self.name, *(self._pair(f) for f in changed)])

    @property
    def spec(self) -> str:
        """The canonical form, with every parameter."""
        return ":".join([self.name, *(self._pair(f) for f in _in_order(self))])

    def schemes(self, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        """Return the schemes that change the result, given those of the audit."""
        return ()

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        return DiagnosticWork(self.short)

    def _must_be_at_least(self, **lowest: int) -> None:
        for field, least in lowest.items():
            if getattr(self, field) < least:
                raise self._out_of_range(field, f"use {least} or more")

    def _out_of_range(self, field: str, hint: str) -> SchemeError:
        value = getattr(self, field)
        return SchemeError(f"`{field}={value}` of `{self.name}` is out of range", hint=hint)

    def _pair(self, field: Field[Any]) -> str:
        value = getattr(self, field.name)
        return f"{field.name}={str(value).lower() if isinstance(value, bool) else value}"


def _in_order(diagnostic: Diagnostic) -> list[Field[Any]]:
    """Return the parameters, the scheme last: its canonical form contains colons."""
    return sorted(fields(diagnostic), key=lambda field: field.name == "scheme")


def with_three_bits(schemes: Sequence[Scheme]) -> Scheme | None:
    """Return the first scheme with 3 bits, at which a difference between parts is large."""
    return next((scheme for scheme in schemes if getattr(scheme, "bits", None) == 3), None)


_ROLES = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "qkv": ("qkv_proj", "query_key_value", "c_attn"),
    "o": ("o_proj", "out_proj", "attn.c_proj"),
    "gate": ("gate_proj",),
    "gate+up": ("gate_up_proj",),
    "up": ("up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h"),
    "down": ("down_proj", "fc2", "fc_out", "dense_4h_to_h", "mlp.c_proj"),
}
_BY_NAME = {name: role for role, names in _ROLES.items() for name in names}
# Of GPT-NeoX, of Bloom and Falcon, of Phi; elsewhere `dense` may be anything.
_BY_NAME |= dict.fromkeys(("attention.dense", "self_attention.dense", "self_attn.dense"), "o")


def role_of(linear: str) -> str:
    """Return what a linear does in a block, by the name that its family gives it.

    Families name the same thing differently, and some fuse what others keep apart. A role is what
    is compared across blocks and models: q, k, v, o, gate, up, down, and what is fused by all of
    its parts. An unknown name is a role of its own.
    """
    parts = linear.split(".")
    by_path = _BY_NAME.get(".".join(parts[-2:])) if len(parts) > 1 else None
    return by_path or _BY_NAME.get(parts[-1], parts[-1])
