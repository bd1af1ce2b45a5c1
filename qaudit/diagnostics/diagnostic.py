"""Find diagnostics and their parts by name; what one is, with its parameters; roles of linears.

A diagnostic is a frozen dataclass. The fields are the parameters, the first line of the docstring
is the description, and `version` is part of the key under which results are stored. Nothing here
imports torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, ClassVar

import qaudit.diagnostics
from qaudit.core.registry import build, plugins_in, read_pairs, unknown
from qaudit.core.scheme import Parameters, Scheme, limited
from qaudit.errors import MachineError, SchemeError
from qaudit.support.plugins import entries_of, imported, plugin_at
from qaudit.types import Plugin

OUTSIDE = "`{name}={}` of `{of}` is out of range"


def at_least(least: int, default: int) -> int:
    """Return a parameter with a lower limit."""
    return limited(default, (lambda n: n >= least, OUTSIDE, f"use {least} or more"))


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
class Diagnostic(Parameters):
    """Base of every diagnostic."""

    reads_weights: ClassVar[bool] = True
    """Whether it has a `measure` part; the others are computed from measurements."""
    reads_previous: ClassVar[bool] = False
    """Whether the checkpoint before changes the result."""

    @property
    def short(self) -> str:
        """The display name: the name and every parameter that is not the default."""
        return ":".join([self.name, *self._pairs(filter(self._differs, fields(self)))])

    def schemes(self, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        """Return the schemes that change the result, given those of the audit."""
        return ()

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        return DiagnosticWork(self.short)


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


ALL = "all"
"""Every diagnostic, each with its default parameters."""


_MACHINERY = frozenset({"case", "diagnostic"})


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
