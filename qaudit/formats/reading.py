"""What a format of quantized weights is, and how its files are refused."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.header import TensorInfo
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.errors import ConfigurationError, SourceError
from qaudit.support.lazy import Tensor
from qaudit.support.patterns import slow_reason

if TYPE_CHECKING:
    from qaudit.formats.activations import Rounding

Config = Mapping[str, Any]
"""A quantization configuration, as the repository has it."""

Decode = Callable[[Mapping[str, Tensor]], Tensor]
"""Make a dense weight of the stored tensors, by their suffixes."""

DAMAGED = "download the repository again; its tensors and its configuration do not fit together"
SCALES, INT32 = ("F16", "BF16", "F32"), ("I32",)
"""Types in which scales are stored, and words of codes."""
_NUMBERS = {"F32": "f", "F16": "e", "BF16": "h", "F64": "d"}
_LONGEST_NAME = 255
_LEFT_DENSE = ("modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers")


def refused(name: str, why: str) -> SourceError:
    return SourceError(f"quantized `{name}` {why}", hint=DAMAGED)


def contradiction(what: str) -> ConfigurationError:
    """Make the error for a configuration that its tensors contradict."""
    return ConfigurationError(what, hint=DAMAGED)


@dataclass(frozen=True)
class StoredLinear:
    """The stored tensors of one dense tensor, by their suffixes."""

    name: str  # of the dense tensor
    infos: Mapping[str, TensorInfo]
    config: Config
    raw: Callable[[str], bytes]  # of a small tensor, by its suffix

    def refused(self, why: str) -> SourceError:
        return refused(self.name, why)

    def sizes(
        self,
        table: Mapping[str, tuple[str, Sequence[str]]],
        because: str = "",
        **known: int,
    ) -> dict[str, int]:
        """Return the sizes that shapes have names for; refuse tensors that do not fit together.

        `{".scales": ("G R", SCALES)}` is a tensor of two sides and one of three types. A suffix
        with `?` may be missing. `because` says what asks for the sizes that are known.
        """
        sizes, asked_by = dict(known), dict.fromkeys(known, because)
        for key, (sides, dtypes) in table.items():
            suffix, names = key.removesuffix("?"), sides.split()
            if suffix not in self.infos and key != suffix:
                continue
            self.dtype(suffix, *dtypes)
            shown, shape = suffix.lstrip("._"), self.infos[suffix].shape
            if len(shape) != len(names) or 0 in shape:
                raise self.refused(
                    f"has a `{shown}` of shape {list(shape)}, "
                    f"where {len(names)} dimensions are needed"
                )
            needed = [sizes.setdefault(n, size) for n, size in zip(names, shape, strict=True)]
            for name, size, stored in zip(names, needed, shape, strict=True):
                if stored != size:
                    raise self.refused(
                        f"has a `{shown}` of shape {list(shape)} where {asked_by[name]} "
                        f"needs {needed}"
                    )
                asked_by.setdefault(name, f"`{shown}`")
        return sizes

    def dtype(self, suffix: str, *dtypes: str) -> str:
        """Return the dtype of a stored tensor, or refuse one that the format does not have."""
        if suffix not in self.infos:
            raise self.refused(f"has no `{suffix.lstrip('._')}`")
        dtype = self.infos[suffix].dtype
        if dtypes and dtype not in dtypes:
            raise self.refused(
                f"has a `{suffix.lstrip('._')}` stored as `{dtype}`, "
                f"where the format has {' or '.join(dtypes)}"
            )
        return dtype

    def group(self, columns: int, groups: int, config: Config) -> int:
        """Return the columns of a group; refuse groups that do not fit, or are not those named."""
        size = -(-columns // groups)
        if -(-columns // size) != groups:
            raise self.refused(f"has {groups} groups for {columns} columns")
        planned = whole_number(config, "group_size", "q_group_size")
        if planned is not None and (columns if planned < 1 else min(planned, columns)) != size:
            raise contradiction(
                f"the quantization configuration has groups of {planned} columns, "
                f"and `{self.name}` is stored in groups of {size}"
            )
        return size

    def must_have(self, bits: int, planned: int | None) -> None:
        """Refuse another number of bits than the configuration has."""
        if planned not in (None, bits):
            raise contradiction(
                f"the quantization configuration has {planned} bits, and `{self.name}` is stored "
                f"in {bits}"
            )

    def scaled(self, rounding: Rounding | str | None) -> Rounding | None:
        """Return a rounding of activations with its scale, where that is fixed and stored."""
        if rounding is None or isinstance(rounding, str) or not rounding.stored_scales:
            return None if isinstance(rounding, str) else rounding
        suffix = next((name for name in rounding.stored_scales if name in self.infos), "")
        if not suffix:
            raise self.refused(
                f"has no `{rounding.stored_scales[0][1:]}`, and the configuration fixes the scale "
                "of activations"
            )
        dtype, raw = self.infos[suffix].dtype, self.raw(suffix)
        if dtype not in _NUMBERS or len(raw) != struct.calcsize(_NUMBERS[dtype]):
            raise self.refused(f"has a `{suffix[1:]}` that is no single number")
        if dtype == "BF16":  # the upper half of a float32
            dtype, raw = "F32", b"\0\0" + raw
        (scale,) = struct.unpack(f"<{_NUMBERS[dtype]}", raw)
        if not 0 < scale < float("inf"):
            raise self.refused(f"has a `{suffix[1:]}` of {scale:g}, which is no scale")
        return replace(rounding, number=float(scale))


@dataclass(frozen=True, eq=False)
class Layout:
    """How the stored tensors of one linear become a dense weight."""

    shape: tuple[int, ...]
    bits: int  # of a code
    decode: Decode
    size: int = 0  # columns that share a scale; 0: scales are not by groups of columns
    rounding: Rounding | None = None  # of activations
    left: str = ""  # rounding of activations that is not run


@dataclass(frozen=True, eq=False)
class Reader:
    """A way of storing quantized linears in safetensors files."""

    name: str
    roots: tuple[str, ...]  # a key that ends so begins a linear
    suffixes: tuple[str, ...]  # of all tensors of a linear
    layout: Callable[[StoredLinear], Layout]
    dense: str = ".weight"  # what a dense tensor's name ends with
    ignored: tuple[str, ...] = ()  # scales of activations, which are not decoded
    beside: tuple[str, ...] = ()  # suffixes without which a root begins no linear
    aliases: tuple[str, ...] = ()  # other names of it in configurations
    older: str = ""  # a file of repositories that are older than `quantization_config`
    bits: Callable[[Config], int | None] = lambda config: bits_in(config)
    rounding: Callable[[Config], Rounding | str | None] = lambda config: None  # of activations
    prepare: Callable[[WeightFolder, Config], Config] | None = None  # adds what headers hold

    def open(self, files: WeightFolder, config: Config, base: str) -> tuple[Layout, dict[str, str]]:
        """Return how a linear is stored and where; refuse one that the configuration denies."""
        for key in _LEFT_DENSE:
            names = config.get(key)
            for name in names if isinstance(names, list) else ():
                if f".{base}".endswith(f".{name}") or base.startswith(f"{name}."):
                    raise contradiction(
                        f"`{key}` names `{str(name)[:60]}`, and `{base[:60]}` is stored quantized"
                    )
        keys = {one: base + one for one in self.suffixes if base + one in files.infos}
        infos = {one: files.infos[key] for one, key in keys.items()}
        stored = StoredLinear(base + self.dense, infos, config, lambda one: files.raw(keys[one]))
        return self.layout(stored), keys

    def read(self, files: WeightFolder, config: Config, base: str) -> Tensor:
        """Return one linear's dense weight; refuse tensors that do not fit their configuration."""
        layout, keys = self.open(files, config, base)
        return layout.decode({suffix: files.read(key) for suffix, key in keys.items()})


def whole_number(config: Config, *keys: str, low: int = -1, high: int = 1 << 20) -> int | None:
    """Return the first of some keys that a configuration has, as a whole number in bounds."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise contradiction(
                f"`{key}` of the quantization configuration is `{str(value)[:40]}`, "
                f"which is not a whole number from {low} to {high}"
            )
        return value
    return None


def bits_in(config: Config) -> int | None:
    return whole_number(config, "num_bits", "bits", "w_bit", low=1, high=16)


def pair_of(value: object, what: str) -> tuple[int, int]:
    """Return two sizes of a configuration."""
    if isinstance(value, list | tuple) and len(value) == 2:
        first, second = value
        if type(first) is int and type(second) is int and first > 0 and second > 0:
            return first, second
    raise contradiction(f"`{what}` is `{str(value)[:40]}`, which is no pair of sizes")


def bound_of(value: object, what: str) -> float:
    """Return a bound of activations of a configuration."""
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise contradiction(f"{what} is `{str(value)[:40]}`, which is no bound")
    return float(value)


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern of a configuration matches a name from its beginning."""
    try:
        slow = slow_reason(pattern, most_wide=4)
        if slow is None and len(name) <= _LONGEST_NAME:
            return re.match(pattern, name) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise contradiction(f"`{pattern[:60]}` is no pattern: {error}") from error
    raise contradiction(
        f"`{pattern[:60]}` could take hours on a name: {slow or 'the name is too long'}"
    )


def most_bits(codes: Iterable[tuple[int, tuple[int, ...]]]) -> int:
    """Return the bits of most codes, of the bits and the shape of each linear."""
    counts: Counter[int] = Counter()
    for bits, shape in codes:
        counts[bits] += prod(shape)
    return counts.most_common(1)[0][0]


class DenseWeights(Protocol):
    """Weights under their dense names, whatever the files hold."""

    def names(self) -> Sequence[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str) -> Tensor: ...


class QuantizedLinear(Protocol):
    """One linear of a file: its shape, the bits of a code, and what rounds its inputs."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def bits(self) -> int: ...
    @property
    def rounding(self) -> Rounding | None: ...


class QuantizedWeights(DenseWeights, Protocol):
    """The weights of a quantized file or folder, decoded one at a time."""

    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def linears(self) -> Mapping[str, QuantizedLinear]: ...
    @property
    def bits(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def nbytes_of(self, name: str) -> int: ...
    def groups(self, name: str) -> Tensor | None: ...


class PackedWeights:
    """The weights of an exported folder; linears are decoded, and all else is as it is stored."""

    def __init__(self, folder: Path, kind: Reader, linears: Collection[str]) -> None:
        self._files, self._kind = WeightFolder(folder), kind
        config = read_configuration(folder).get("quantization_config")
        self._config = config if isinstance(config, dict) else {}
        self._linears = {f"{linear}{kind.dense}": linear for linear in linears}

    def names(self) -> Sequence[str]:
        starts = tuple(f"{linear}." for linear in self._linears.values())
        # No format packs a bias, which is a tensor of its own.
        rest = (n for n in self._files.names() if n.endswith(".bias") or not n.startswith(starts))
        return [*self._linears, *rest]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(name)

    def read(self, name: str) -> Tensor:
        if name not in self._linears:
            return self._files.read(name)
        return self._kind.read(self._files, self._config, self._linears[name])
