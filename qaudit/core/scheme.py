"""What a quantization scheme is: a frozen dataclass with one verb.

Its fields are its parameters, its docstring's first line its description, `version` part of
every cache key. A file dropped into `core/schemes/` is registered by being there
(`core/registry.py`), and the contract tests run on it with no other edit.

The verb sees the linears of one transformer block that read the same input, because that is
the largest thing one set of input statistics belongs to: q/k/v together, gate/up together.
It returns what a file would store (`qaudit/core/linears.py`) and the dense weights decoded from
it, so that no result here depends on a packing kernel. A scheme that changes what the linears
read, by rounding or rotating it, returns one function for the group (`Quantized.inputs`), and the
weights that belong to it; one that leaves the product itself to a library returns its own forward.

Shapes: R output rows, C input columns, G groups of columns.

**A file that is quantized already**, beside schemes: named, compared and stored like one.

Its weights are read and not made, so that it takes no part in the registry of schemes: a plan
writes its canonical form, in which the hash identifies what was measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

from qaudit.core.grid import SHARES
from qaudit.core.linears import (
    CodeLayout,
    Linears,
    Quantize,
    Quantized,
    WholeBlock,
    alone,
    refuse_nonfinite,
)
from qaudit.errors import MachineError, SchemeError

Shapes = Mapping[tuple[int, str], tuple[int, int]]
"""Rows and columns of each linear, by its block and its name."""

UNROUNDED = 16
"""Bits of activations that stay as they are."""
NO_CACHE = "none"
CACHES = {"int8": 8, "int4": 4, "fp8": 8}
"""Types of a cache of keys and values, and the bits of each."""
BIT_CLASS = "([1-9]|w[1-9]a[1-9])(kv[48])?"
"""Bits of weights, of activations and of the cache: `4`, `w8a8`, `w4a4kv4`, as an expression."""

T = TypeVar("T")
Limit = tuple[Callable[[Any], bool], str, str]
"""Which values a parameter has, what is said of another, and a hint."""


def one_of(name: str, values: Collection[object], problem: str) -> Limit:
    return values.__contains__, problem, f"use {' or '.join(f'{name}={v}' for v in values)}"


def limited(default: T, limit: Limit) -> T:
    """Return a parameter with a limit of its own."""
    parameter: T = field(default=default, metadata={"limit": limit})
    return parameter


def added(default: T, limit: Limit | None = None) -> T:
    """Return a parameter that a later version added: the canonical form has it if it is changed.

    So the measurements of earlier versions keep their names.
    """
    parameter: T = field(default=default, metadata={"added": True, "limit": limit})
    return parameter


BITS: Limit = (lambda bits: 2 <= bits <= 8, "{} bits is out of range", "use 2 to 8 bits")
_GROUP: Limit = (
    lambda group: group >= 1 or group == -1,
    "a group of {} columns does not exist",
    "use a positive group size such as 128, or -1 for one group per row",
)
_CLIP: Limit = (lambda clip: 0 < clip <= 1, "a clip of {} is out of range", "use 0 < clip <= 1")
LIMITS: Mapping[str, Limit] = {
    "kv": (
        lambda kv: kv == NO_CACHE or kv in CACHES,
        "a cache of keys and values in `{}` is not supported",
        f"use {', '.join(f'kv={name}' for name in CACHES)}, or leave it out",
    ),
    "bits": BITS,
    "act": (
        lambda bits: 2 <= bits <= 8 or bits == UNROUNDED,
        "activations of {} bits are out of range",
        f"use 2 to 8 bits, or act={UNROUNDED} to leave them as they are",
    ),
    "group": _GROUP,
    "block": _GROUP,
    "clip": _CLIP,
    "weight_clip": _CLIP,
    "scale_dtype": one_of("scale_dtype", ("bf16", "float32"), "scales in `{}` are not supported"),
    "alpha": (lambda alpha: 0 <= alpha <= 1, "an alpha of {} is out of range", "use 0 to 1"),
    "damp": (lambda damp: 0 < damp < 1, "a damp of {} is out of range", "use 0 < damp < 1"),
    "damp_increment": (
        lambda step: 0 <= step < 1,
        "a damp_increment of {} is out of range",
        "use 0 <= damp_increment < 1; 0 never raises the damping",
    ),
    "keep": (lambda count: count >= 0, "{} columns cannot keep more bits", "use 0 or more"),
    "steps": (lambda steps: 0 <= steps <= 100_000, "{} steps are out of range", "use 0 to 100000"),
}
"""Limits of parameters by their names, which mean the same in every scheme (flags have none)."""


class Calibration(Enum):
    """Which activations a scheme must see before it can quantize a block."""

    NONE = "none"
    OWN_STREAM = "own stream"  # those its own, already quantized, earlier linears produce
    OWN_BLOCKS = "own blocks"  # the same, but all of a block's before the first is quantized
    BOTH_STREAMS = "both streams"  # its own, beside those of the unquantized model
    FULL_PRECISION = "full precision"  # those the unquantized model produces
    WHOLE_BLOCK = "whole block"  # its own, and what the unquantized model's block returns

    @property
    def has_stream(self) -> bool:
        """Say whether calibration tokens go through what the scheme made of earlier linears."""
        return self not in (Calibration.NONE, Calibration.FULL_PRECISION)

    @property
    def reads_full_precision(self) -> bool:
        """Say whether calibration tokens go through the unquantized model."""
        return self in (
            Calibration.FULL_PRECISION,
            Calibration.BOTH_STREAMS,
            Calibration.WHOLE_BLOCK,
        )


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Base of what is named with parameters, which are its fields."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}

    def __post_init__(self) -> None:
        """Refuse parameters out of range."""
        for parameter in fields(self):
            value = getattr(self, parameter.name)
            limit = parameter.metadata.get("limit") or LIMITS.get(parameter.name)
            if limit is not None and not isinstance(value, bool) and not limit[0](value):
                message = limit[1].format(value, name=parameter.name, of=self.name)
                raise SchemeError(message, hint=limit[2])

    @property
    def spec(self) -> str:
        """The canonical form, with every parameter."""
        written = (f for f in fields(self) if not f.metadata.get("added") or self._differs(f))
        return ":".join([self.name, *self._pairs(written)])

    def _differs(self, parameter: Field[Any]) -> bool:
        return bool(getattr(self, parameter.name) != parameter.default)

    def _pairs(self, parameters: Iterable[Field[Any]]) -> Iterator[str]:
        """Yield parameters as text; last a cache, or a scheme, whose canonical form has colons."""
        for parameter in sorted(parameters, key=lambda field: field.name in ("kv", "scheme")):
            value = getattr(self, parameter.name)
            yield f"{parameter.name}={str(value).lower() if isinstance(value, bool) else value}"


@dataclass(frozen=True, kw_only=True)
class Scheme(Parameters):
    """Base of every scheme."""

    calibration: ClassVar[Calibration] = Calibration.NONE
    code_bits: ClassVar[int | None] = None  # of each weight's code, where `bits` is no parameter
    mixes_types: ClassVar[bool] = False  # whether a shape decides how many bits codes have
    mixes_bits: ClassVar[bool] = False  # whether a table has the bits of each linear
    any_model: ClassVar[bool] = True  # whether no model is refused for what it is made of
    extra: ClassVar[tuple[str, str] | None] = None  # a library, and what installs it
    act_bits: ClassVar[int | None] = None  # of each activation's code, where `act` is no parameter
    rounds_columns: ClassVar[bool] = False  # in turn, by the loop that a plan chooses
    cache_clip: ClassVar[float] = 1.0  # share to which the range of cached keys and values is cut
    remarks: ClassVar[Mapping[str, str]] = {}  # preset -> what about it had to be inferred

    kv: str = added(NO_CACHE)  # what keys and values are kept in (`qaudit/core/floats.py`)

    def must_be_installed(self) -> None:
        if self.extra is None:
            return
        library, distribution = self.extra
        try:
            version(library)
        except PackageNotFoundError as error:
            raise MachineError(
                f"`{self.short}` needs the library `{library}`, which is not installed",
                hint=f"pip install '{distribution}', or leave {self.name} out",
            ) from error

    @property
    def transforms_inputs(self) -> bool:
        """Whether its weights are for inputs that it transforms before any rounding."""
        return getattr(self, "rotate", False)

    @property
    def layout(self) -> CodeLayout | None:
        """What files hold of its weights; None: what is stored says all, or no file can."""
        return None

    @property
    def compares_modules(self) -> bool:
        """Whether it reads tokens and what modules make of them (`Linears.tokens`, `around`)."""
        return getattr(self, "modules", False)

    @property
    def experts_see_all(self) -> bool:
        """Whether each expert is calibrated on all tokens, and not on those routed to it."""
        return getattr(self, "all_tokens", False)

    @property
    def rotates_outputs(self) -> bool:
        """Whether it asks which outputs of a block can be rotated."""
        return False

    @property
    def rotates_heads(self) -> bool:
        """Whether keys and values are rounded in a rotated basis."""
        return False

    @property
    def learning_steps(self) -> int:
        """How many mini-batches a block is learned on."""
        return getattr(self, "steps", 0)

    @property
    def trials(self) -> int:
        """How many candidates of its scale each weight is rounded under, before one is taken."""
        return len(SHARES) if getattr(self, "search", False) else 0

    def tried_weights(self, count: int) -> int:
        """Return how many weights a GPU rounds at a time, of linears that have so many."""
        return count

    @property
    def sampled_operations(self) -> int:
        """How many operations it takes with each number of the sampled inputs."""
        return 0

    @property
    def calibrates(self) -> bool:
        return self.calibration is not Calibration.NONE

    def planned_bits(self, shapes: Shapes, blocks: int) -> float | None:
        """Return the bits a weight will take, where shapes decide it; None where a name says it."""
        return None

    def quantize(self, linears: Linears) -> Quantized:
        """Quantize a group; a scheme that learns on whole blocks then learns on the group alone."""
        refuse_nonfinite(linears)
        return self.train(alone(linears, self.name))(linears)

    def train(self, block: WholeBlock) -> Quantize:
        """Learn on what a block returns; return what quantizes its groups, which is called in turn.

        Only where `calibration` is `WHOLE_BLOCK`.
        """
        raise NotImplementedError

    @property
    def remark(self) -> str | None:
        """Return the inferred settings, if these are those of a published study."""
        preset = self._preset()
        return f"settings of {preset}: {self.remarks[preset]}" if preset in self.remarks else None

    @property
    def bit_class(self) -> str:
        """Return the class it competes in: `4` for codes of four bits, whatever their scales cost.

        With activations of four bits, too, it is `w4a4`, and with a cache of four bits `w4a4kv4`.
        """
        return bit_class_of(
            getattr(self, "bits", self.code_bits), getattr(self, "act", self.act_bits), self.kv
        )

    def class_at(self, bits: float | None) -> str:
        """Return the class where it stored so many bits per weight: 4 for 4.5 bits.

        Scales and minima of llama.cpp's types take at most one bit beside a code.
        """
        if not self.mixes_types or bits is None or not math.isfinite(bits) or bits <= 1:
            return self.bit_class
        return f"{math.ceil(bits) - 1}{self.bit_class[1:]}"

    @property
    def short(self) -> str:
        """Return the display name: `gptq-4bit`, and behind it whatever is not default.

        The settings of a preset are one name: `gptq-4bit (llm-compressor)`.
        """
        head = f"{self.name}-{self.bits}bit" if hasattr(self, "bits") else self.name
        changed = [f for f in fields(self) if f.name != "bits" and self._differs(f)]
        preset = self._preset()
        settings = self.presets.get(preset, {})
        if any(f.name in settings for f in changed):
            head += f" ({preset})"
            changed = [f for f in changed if f.name not in settings]
        return ":".join([head, *self._pairs(changed)])

    def _preset(self) -> str:
        """Return the preset whose settings these are; "" if there is none."""
        for name, settings in self.presets.items():
            if all(getattr(self, key) == value for key, value in settings.items()):
                return name
        return ""


def most_bits_first(bit_class: str) -> tuple[float, str]:
    """Return the key that orders classes; weights decide, and then whether activations are kept."""
    valid = re.fullmatch(BIT_CLASS, bit_class) is not None
    return (-float(bit_class.removeprefix("w")[0]) if valid else -math.inf, bit_class)


def bit_class_of(bits: object, act: object, kv: str | None = None) -> str:
    name = str(bits) if act is None or str(act) == "16" else f"w{bits}a{act}"
    return f"{name}kv{CACHES[kv]}" if kv in CACHES else name


@dataclass(frozen=True, kw_only=True)
class StandIn(Scheme):
    """Another scheme by its name, its version and its remark.

    Code that records what a scheme does, or replaces a part of it, wraps it: its measurements then
    have the identity of the scheme itself.
    """

    inner: Scheme

    def __post_init__(self) -> None:
        for name in ("name", "version", "kv"):
            object.__setattr__(self, name, getattr(self.inner, name))

    def quantize(self, linears: Linears) -> Quantized:
        return self.made(linears, self.inner.quantize(linears))

    def train(self, block: WholeBlock) -> Quantize:
        quantize = self.inner.train(block)
        return lambda linears: self.made(linears, quantize(linears))

    def made(self, linears: Linears, quantized: Quantized) -> Quantized:
        raise NotImplementedError


for _name in (
    "short", "spec", "remark", "calibrates", "class_at", "compares_modules", "experts_see_all",
    "rotates_outputs", "rotates_heads", "cache_clip",
):  # fmt: skip
    setattr(StandIn, _name, property(attrgetter(f"inner.{_name}")))


LOOKS_BROKEN = "looks broken"
"""What a note of weights that are far from those of the base begins with."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._@+-]+")


@dataclass(frozen=True, kw_only=True)
class Shipped(Scheme):
    """A quantized repository or file, as it ships."""

    name: ClassVar[str] = "shipped"
    calibration: ClassVar[Calibration] = Calibration.NONE

    file: str  # its label, which no other scheme of the audit has
    format: str
    bits: int  # of most codes
    sha256: str  # of weights and quantization configuration
    act: int = UNROUNDED  # bits of activations, as they are run

    def __post_init__(self) -> None:
        """Take whatever the file holds."""

    @property
    def short(self) -> str:
        return self.file

    def quantize(self, linears: Linears) -> Quantized:
        """Refuse: the weights are read from the file, whatever the base is."""
        raise NotImplementedError(f"`{self.file}` is quantized already")


def shipped_reference(label: str, format_name: str, bits: int) -> str:
    """Return the note of a base that is quantized already and that others are compared with."""
    return (
        f"`{label}` ships quantized ({format_name}, {bits}-bit): decoded, it is the reference; "
        "added loss, KL divergence and sizes are against the base as it ships"
    )


def label_for(place: str) -> str:
    """Return a place as a part of a canonical form: letters, digits and `._@+-` alone."""
    return _NOT_IN_NAMES.sub("-", place).strip("-") or "file"
