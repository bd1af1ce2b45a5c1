"""GPTQ, as GPTQModel and AutoGPTQ have it: integers in 32-bit words, scales by group of columns.

Codes are packed along the input and zero points along the output. Version 1 stores a zero point
less one, so that zero wraps around, and every loader reads it: symmetric codes are written so. Zero
points need v2, which stores them as they are. The bits of each linear follow from its shapes, so
that a `dynamic` configuration needs no rules. bfloat16 scales from 2^-17 up are exact in float16.

    qweight  int32 (words of C codes, R)
    qzeros   int32 (G, words of R zeros)   v1 stores zero - 1, v2 the zero itself
    scales   fp16 (G, R)
    g_idx    int32 (C,), the group of each column
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qaudit.core.stored import StoredWeight
from qaudit.errors import SchemeError
from qaudit.formats.arithmetic import in_order, indexed, must_be_symmetric, pack, scaled, unpack
from qaudit.formats.packing import (
    Document,
    Format,
    Runtime,
    declared_bits,
    declared_group,
    half_scales,
    integer_codes,
    zero_points,
)
from qaudit.formats.reading import (
    SCALES,
    Config,
    Layout,
    Reader,
    StoredLinear,
    contradiction,
    group_size,
    matches,
    must_be_group,
    whole_number,
)
from qaudit.support.lazy import Tensor, torch
from qaudit.version import __version__

_FIRST, _SECOND = ("gptq", ""), ("gptq_v2",)


def is_first_version(config: Config) -> bool:
    """Return whether stored zero points are one too low; refuse an unknown layout."""
    kind = str(config.get("checkpoint_format") or config.get("format") or "").lower()
    if kind not in (*_FIRST, *_SECOND):
        raise contradiction(f"the checkpoint format `{kind[:40]}` of GPTQ is not known")
    return kind in _FIRST


def _gptq(parts: StoredLinear) -> Layout:
    _must_be_converted(parts)
    for suffix in (".qweight", ".qzeros"):
        parts.must_hold(suffix, "I32")
    parts.must_hold(".scales", *SCALES)
    words, rows = parts.shape(".qweight", 2)
    groups, _ = parts.shape(".scales", 2)
    packed_zeros = parts.shape(".qzeros", 2)[1]
    parts.must_be(".scales", (groups, rows), "`qweight`")
    parts.must_be(".qzeros", (groups, packed_zeros), "`scales`")
    bits = packed_zeros * 32 // rows
    if bits not in (2, 3, 4, 8) or bits * rows != packed_zeros * 32 or words * 32 % bits:
        raise parts.refused(
            f"packs {rows} zero points in {packed_zeros} words, which no number of bits does"
        )
    columns = words * 32 // bits
    planned = whole_number(parts.config, "bits", "w_bit", low=2, high=8)
    if planned is not None and planned != bits and not parts.config.get("dynamic"):
        raise contradiction(
            f"the quantization configuration has {planned} bits, and `{parts.name}` is stored "
            f"in {bits}"
        )
    size = group_size(parts, columns, groups)
    if ".g_idx" in parts.infos:
        parts.must_hold(".g_idx", "I32", "I64")
        parts.must_be(".g_idx", (columns,), f"{bits}-bit `qweight`")
    elif parts.config.get("desc_act") is True and not _by_rules(parts.config, "desc_act"):
        raise parts.refused("has no `g_idx`, and the configuration has `desc_act: true`")
    if not parts.config.get("dynamic"):
        must_be_group(parts, columns, size, parts.config)
    how = _Stored(
        parts.name,
        bits,
        size,
        first=is_first_version(parts.config),
        symmetric=parts.config.get("sym") is True and not _by_rules(parts.config, "sym"),
        in_order=parts.config.get("desc_act") is False and not _by_rules(parts.config, "desc_act"),
    )
    return Layout((rows, columns), bits, partial(_from_gptq, how), size)


def _must_be_converted(parts: StoredLinear) -> None:
    dynamic = parts.config.get("dynamic")
    for rule in dynamic if isinstance(dynamic, Mapping) else ():
        if rule.startswith("-:") and matches(rule[2:], parts.name.removesuffix(".weight")):
            raise contradiction(
                f"`dynamic` leaves `{parts.name}` dense by `{rule[:60]}`, and it is stored "
                "quantized"
            )


def _by_rules(config: Config, key: str) -> bool:
    dynamic = config.get("dynamic")
    rules = dynamic.values() if isinstance(dynamic, Mapping) else ()
    return any(isinstance(rule, Mapping) and key in rule for rule in rules)


@dataclass(frozen=True)
class _Stored:
    name: str
    bits: int
    size: int  # of a group
    first: bool  # zero points are one too low
    symmetric: bool
    in_order: bool  # groups are columns that follow one another


def _from_gptq(how: _Stored, read: Mapping[str, Tensor]) -> Tensor:
    name, bits, size = how.name, how.bits, how.size
    words_CR, scales_GR = read[".qweight"], read[".scales"]
    columns, rows = words_CR.shape[0] * 32 // bits, words_CR.shape[1]
    zeros_RG = unpack(read[".qzeros"], bits, rows).T.float()
    if how.first:
        zeros_RG = (zeros_RG + 1) % 2**bits
    if how.symmetric:
        must_be_symmetric(name, "`sym: true`", zeros_RG - 2 ** (bits - 1))
    group_of_C = in_order(columns, size)
    if ".g_idx" in read:
        stored_C = indexed(name, read[".g_idx"], len(scales_GR))
        if how.in_order and not torch.equal(stored_C, group_of_C):  # some runtimes leave it out
            raise contradiction(
                "the quantization configuration has `desc_act: false`, and the `g_idx` of "
                f"`{name}` is in another order than its columns"
            )
        group_of_C = stored_C
    codes_RC = unpack(words_CR.T.contiguous(), bits, columns).float()
    centered_RC = codes_RC.sub_(zeros_RG.index_select(1, group_of_C))
    return scaled(name, centered_RC, scales_GR.T, group_of_C)


GPTQ = Reader(
    "gptq",
    (".qweight",),
    (".qweight", ".qzeros", ".scales", ".g_idx"),
    _gptq,
    older="quantize_config.json",
)


class GptqFiles(Format):
    """Files that GPTQModel, transformers, vLLM and SGLang load as GPTQ."""

    name: ClassVar[str] = "gptq"
    loaded_by: ClassVar[Mapping[str, tuple[str, ...]]] = {"gptqmodel": (), "vllm": ()}
    reader = GPTQ
    config_files: ClassVar[tuple[str, ...]] = ("quantize_config.json",)
    bits: ClassVar[tuple[int, ...]] = (3, 4, 8)
    multiple: ClassVar[int] = 32  # kernels read this many rows at once

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        return (
            Runtime("GPTQModel", "7.6", "backend gptq_torch computes with these very weights"),
            Runtime("transformers", "5.0", "with gptqmodel and optimum"),
            Runtime("vLLM", "0.33", "4 and 8 bits, symmetric, groups of 32, 64, 128 or rows"),
            Runtime("SGLang", "0.5.23", "4 and 8 bits, symmetric"),
        )

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        codes = integer_codes(linear, stored, self.scheme, self.name)
        rows, columns = codes.codes_RC.shape
        if codes.bits not in self.bits:
            raise SchemeError(
                f"`gptq` files have 3, 4 or 8 bits, and `{self.scheme.short}` has {codes.bits}",
                hint="export it as `compressed-tensors`, which has 2 to 8",
            )
        if rows % self.multiple or columns % self.multiple:
            raise SchemeError(
                f"`{linear}` is {rows} x {columns}, and `gptq` files hold multiples of "
                f"{self.multiple}",
                hint="export it as `compressed-tensors`",
            )
        v1_zero = 2 ** (codes.bits - 1) - 1
        zeros_RG = zero_points(codes, v1_zero)
        return {
            f"{linear}.qweight": pack(codes.codes_RC.cpu(), codes.bits).T.contiguous(),
            f"{linear}.qzeros": pack(zeros_RG.T.contiguous(), codes.bits),
            f"{linear}.scales": half_scales(linear, codes).T.contiguous(),
            f"{linear}.g_idx": torch.arange(columns, dtype=torch.int32) // codes.group,
        }

    def config(self, unquantized: tuple[str, ...], *, symmetric: bool) -> Document:
        return {
            "quant_method": "gptq",
            "bits": declared_bits(self.scheme),
            "group_size": declared_group(self.scheme),
            "desc_act": False,
            "sym": symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq" if symmetric else "gptq_v2",
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"qaudit:{__version__}"]},
        }
