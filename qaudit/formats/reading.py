"""What a format of quantized weights is, what it does to activations, and how files are refused.

A rounding of activations is known by the configuration alone: by token, or by groups of a token, it
needs nothing else; under a fixed scale it takes the one that is stored beside the weight.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from qaudit.checkpoints.header import TensorInfo
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.errors import ConfigurationError, SourceError, UsageError
from qaudit.support.foreign import slow_reason
from qaudit.support.lazy import Tensor, torch
from qaudit.whole import read_table

Config = Mapping[str, Any]
"""A quantization configuration, as the repository has it."""

Sides = Mapping[str, tuple[str, Sequence[str]]]
"""By suffix, the names of sides and the dtypes that a tensor may have."""
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


Kind = Literal[
    "fp8", "fp8 by 128", "fp8 fixed", "int8", "int8 fixed", "int8 but outliers", "nvfp4", "mxfp4"
]
_FIXED: Mapping[str, tuple[str, ...]] = {
    "fp8 fixed": (".input_scale", ".activation_scale"),
    "int8 fixed": (".input_scale",),
    "nvfp4": (".input_global_scale",),
}


@dataclass(frozen=True)
class Rounding:
    """How what a linear reads is rounded; the number is a scale, a bound or a threshold."""

    kind: Kind
    number: float | None = None

    @property
    def bits(self) -> int | None:
        """Return the bits of each activation; None where some keep all of theirs."""
        if self.kind == "int8 but outliers":
            return None
        return 4 if self.kind.endswith("fp4") else 8

    def __call__(self, x: Tensor) -> Tensor:
        from qaudit.core.floats import in_parts

        whole_batch = self.kind == "int8 but outliers"  # of any token of a batch
        return self._round(x) if whole_batch else in_parts(x, self._round)

    def _round(self, x: Tensor) -> Tensor:
        from qaudit.core import floats

        limit, number = self.number, self.number or 0.0
        rounded: Mapping[Kind, Callable[[], Tensor]] = {
            "fp8": lambda: floats.fp8_tokens(x if limit is None else x.clamp(-limit, limit)),
            "fp8 by 128": lambda: floats.fp8_token_groups(x),
            "int8": lambda: floats.int8_tokens(x),
            "mxfp4": lambda: floats.mxfp4_groups(x, "even"),
            "nvfp4": lambda: floats.nvfp4_groups(x, x.new_tensor(number, dtype=torch.float32)),
            "fp8 fixed": lambda: floats.e4m3(x.float() / number).float() * number,
            "int8 fixed": lambda: (x.float() / number).round().clamp(-128, 127) * number,
            "int8 but outliers": lambda: _int8_but_outliers(x.float(), number),
        }
        return rounded[self.kind]().to(x.dtype)


def _int8_but_outliers(x: Tensor, threshold: float) -> Tensor:
    """Round all but columns with a value from a threshold on (LLM.int8)."""
    large = x.abs() >= threshold if threshold else x.abs() < 0
    rest = x.masked_fill(large, 0)
    scale = (rest.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    whole_C = large.flatten(0, -2).any(0)
    return (rest / scale).round().mul(scale).where(~whole_C, x)


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
        table: Sides,
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

    def blocks(self, table: Sides, block: tuple[int, int], shape: tuple[int, int]) -> None:
        """Refuse scales that are not one for each block, `D` down and `A` across."""
        down, across = (-(-side // size) for side, size in zip(shape, block, strict=True))
        self.sizes(table, f"blocks of {block[0]} by {block[1]}", D=down, A=across)

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

    def must_count(self, suffix: str, needed: int, *dtypes: str) -> None:
        """Refuse another count of numbers in a stored tensor, whatever its shape."""
        self.dtype(suffix, *dtypes)
        if (count := prod(self.infos[suffix].shape)) != needed:
            shown = suffix.lstrip("._")
            raise self.refused(f"has a `{shown}` of {count} numbers, where {needed} are needed")

    def scaled(self, rounding: Rounding | str | None) -> Rounding | None:
        """Return a rounding of activations with its scale, where that is fixed and stored."""
        if rounding is None or isinstance(rounding, str):
            return None
        if not (suffixes := _FIXED.get(rounding.kind)):
            return rounding
        suffix = next((name for name in suffixes if name in self.infos), "")
        if not suffix:
            raise self.refused(
                f"has no `{suffixes[0][1:]}`, and the configuration fixes the scale of activations"
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
            for name in names if isinstance(names := config.get(key), list) else ():
                if f".{base}".endswith(f".{name}") or base.startswith(f"{name}."):
                    raise contradiction(
                        f"`{key}` names `{str(name)[:60]}`, and `{base[:60]}` is stored quantized"
                    )
        keys = {part: base + part for part in self.suffixes if base + part in files.infos}
        infos = {part: files.infos[key] for part, key in keys.items()}
        stored = StoredLinear(base + self.dense, infos, config, lambda part: files.raw(keys[part]))
        return self.layout(stored), keys


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
    if isinstance(value, list | tuple) and [*map(type, value)] == [int, int] and min(value) > 0:
        return value[0], value[1]
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


VOCABULARY = "vocabulary"


def read_tokenizer(folder: Path) -> Mapping[str, Any] | None:
    """Return the table of a folder's `tokenizer.json`; None where none can be compared."""
    table = read_table(folder / "tokenizer.json")
    model = table.get("model")
    return table if isinstance(model, dict) and isinstance(model.get("vocab"), dict) else None


def differing_part(own: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Return the part by which two tokenizers make other tokens of a text; "" if there is none."""
    if own["model"]["vocab"] != base["model"]["vocab"]:
        return VOCABULARY
    if merges_of(own) != merges_of(base):
        return "merges"
    for part in ("normalizer", "pre_tokenizer"):
        if not _alike(own.get(part), base.get(part)):
            return part.replace("_", "-")
    return ""


def merges_of(table: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the pairs of a BPE, which are written as lists or with a space."""
    pairs = table["model"].get("merges") or ()
    return [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in pairs]


def _alike(own: Any, base: Any) -> bool:
    """Compare settings; one that an older library did not write yet has its default."""
    if isinstance(own, dict) and isinstance(base, dict):
        return all(_alike(own[key], base[key]) for key in own.keys() & base.keys())
    if isinstance(own, list) and isinstance(base, list):
        return len(own) == len(base) and all(map(_alike, own, base))
    return type(own) is type(base) and bool(own == base)


OF_THE_BASE = "give the model that the file was made from as the target"


def other_model(label: str, key: str, own: object, theirs: object, base: Path) -> UsageError:
    return UsageError(
        f"`{label}` is no file of this model: its `{key}` is {str(own)[:40]}, and that of `{base}` "
        f"is {str(theirs)[:40]}",
        hint=OF_THE_BASE,
    )


def other_tokenizer(label: str, part: str, base: Path) -> UsageError:
    """Make the error for a file whose tokens are not those of its base."""
    what = "token ids mean other text" if part == VOCABULARY else "a text has other tokens"
    kind = f"other {part}" if part == "merges" else f"another {part}"
    return UsageError(f"`{label}` has {kind} than `{base}`: {what}", hint=OF_THE_BASE)
