"""GPTQ, AWQ and MLX: integers in 32-bit words, with a scale for each group of columns.

GPTQ packs codes along the input and zero points along the output. Its version 1 stores a zero
point less one, so that zero wraps around; `gptq_v2` stores it as it is. The bits of each linear
follow from its shapes, so that a `dynamic` configuration needs no rules. AWQ is AutoAWQ's GEMM
layout: eight neighbours along the output in a word, out of order. MLX adds a bias to each group
in place of a zero point, and also quantizes embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from qaudit.checkpoints.quantized.arithmetic import (
    from_awq_order,
    in_order,
    indexed,
    scaled,
    unpack,
    wide,
)
from qaudit.checkpoints.quantized.format import (
    SCALES,
    Config,
    Format,
    Layout,
    Parts,
    contradiction,
    group_size,
    must_be_group,
    whole_number,
)

if TYPE_CHECKING:
    from torch import Tensor

_FIRST, _SECOND = ("gptq", ""), ("gptq_v2",)
_AWQ_BITS, _AWQ_PER_WORD = 4, 8


def is_first_version(config: Config) -> bool:
    """Return whether stored zero points are one too low; refuse an unknown layout."""
    kind = str(config.get("checkpoint_format") or config.get("format") or "").lower()
    if kind not in (*_FIRST, *_SECOND):
        raise contradiction(f"the checkpoint format `{kind[:40]}` of GPTQ is not known")
    return kind in _FIRST


def _gptq(parts: Parts) -> Layout:
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
    if not parts.config.get("dynamic"):
        must_be_group(parts, columns, size, parts.config)
    first = is_first_version(parts.config)
    return Layout((rows, columns), bits, partial(_from_gptq, parts.name, bits, size, first), size)


def _from_gptq(name: str, bits: int, size: int, first: bool, read: Mapping[str, Tensor]) -> Tensor:
    words_CR, scales_GR = read[".qweight"], read[".scales"]
    columns, rows = words_CR.shape[0] * 32 // bits, words_CR.shape[1]
    zeros_RG = unpack(read[".qzeros"], bits, rows).T.float()
    if first:
        zeros_RG = (zeros_RG + 1) % 2**bits
    group_of_C = in_order(columns, size)
    if ".g_idx" in read:
        group_of_C = indexed(name, read[".g_idx"], len(scales_GR))
    codes_RC = unpack(words_CR.T.contiguous(), bits, columns).float()
    centered_RC = codes_RC.sub_(zeros_RG.index_select(1, group_of_C))
    return scaled(name, centered_RC, scales_GR.T, group_of_C)


def _awq(parts: Parts) -> Layout:
    version = str(parts.config.get("version") or "gemm").lower()
    if version != "gemm":
        raise contradiction(f"AWQ's layout `{version[:40]}` is not read; it is `gemm` alone")
    planned = whole_number(parts.config, "bits", "w_bit", low=2, high=8)
    if planned not in (None, _AWQ_BITS):
        raise contradiction(f"the quantization configuration has {planned} bits, and AWQ packs 4")
    parts.must_hold(".qweight", "I32")
    parts.must_hold(".scales", *SCALES)
    columns, words = parts.shape(".qweight", 2)
    rows = words * _AWQ_PER_WORD
    groups = parts.shape(".scales", 2)[0]
    parts.must_be(".scales", (groups, rows), "`qweight`")
    if ".qzeros" in parts.infos:
        parts.must_hold(".qzeros", "I32")
        parts.must_be(".qzeros", (groups, words), "`scales`")
    elif parts.config.get("zero_point", True):
        raise parts.refused("has no `qzeros`, and the configuration has zero points")
    size = group_size(parts, columns, groups)
    must_be_group(parts, columns, size, parts.config)
    return Layout((rows, columns), _AWQ_BITS, partial(_from_awq, parts.name, size), size)


def _from_awq(name: str, size: int, read: Mapping[str, Tensor]) -> Tensor:
    def codes(words_NW: Tensor) -> Tensor:
        in_words = unpack(words_NW, _AWQ_BITS, words_NW.shape[1] * _AWQ_PER_WORD)
        return from_awq_order(in_words).T.float()

    centered_RC = codes(read[".qweight"])
    group_of_C = in_order(centered_RC.shape[1], size)
    if ".qzeros" in read:
        centered_RC.sub_(codes(read[".qzeros"]).index_select(1, group_of_C))
    else:
        centered_RC.sub_(2 ** (_AWQ_BITS - 1))
    return scaled(name, centered_RC.contiguous(), read[".scales"].T, group_of_C)


def _mlx(parts: Parts) -> Layout:
    """Take bits and group from the configuration of this linear, or of all."""
    own = parts.config.get(parts.name.removesuffix(".weight"))
    config = {**parts.config, **(own if isinstance(own, dict) else {})}
    mode = str(config.get("mode") or "affine")
    if mode != "affine":
        raise contradiction(f"MLX's mode `{mode[:40]}` is not read; it is `affine` alone")
    bits = whole_number(config, "bits", low=2, high=8)
    if bits is None:
        raise contradiction("the quantization configuration of MLX has no `bits`")
    parts.must_hold(".weight", "U32")
    rows, words = parts.shape(".weight", 2)
    groups = parts.shape(".scales", 2)[1]
    for suffix in (".scales", ".biases"):
        parts.must_hold(suffix, *SCALES)
        parts.must_be(suffix, (rows, groups), "`weight`")
    columns = words * 32 // bits
    if words * 32 % bits:
        raise parts.refused(f"has rows of {words} words, which hold no whole number of {bits} bits")
    size, planned = group_size(parts, columns, groups), whole_number(config, "group_size", low=1)
    if planned is not None and planned != size:
        raise contradiction(
            f"the quantization configuration has {bits} bits in groups of {planned} columns, "
            f"and `{parts.name}` is stored in groups of {size}"
        )
    return Layout((rows, columns), bits, partial(_from_mlx, parts.name, bits, size), size)


def _from_mlx(name: str, bits: int, size: int, read: Mapping[str, Tensor]) -> Tensor:
    import torch

    words_RW = read[".weight"].view(torch.int32)
    columns = words_RW.shape[1] * 32 // bits
    group_of_C = in_order(columns, size)
    scales_RG, biases_RG = wide(read[".scales"], name), wide(read[".biases"], name)
    weight_RC = unpack(words_RW, bits, columns).float()
    weight_RC.mul_(scales_RG.index_select(1, group_of_C))
    return weight_RC.add_(biases_RG.index_select(1, group_of_C))


GPTQ = Format("gptq", (".qweight",), (".qweight", ".qzeros", ".scales", ".g_idx"), _gptq)
AWQ = Format("awq", (".qweight",), (".qweight", ".qzeros", ".scales"), _awq)
MLX = Format("mlx", (".scales",), (".weight", ".scales", ".biases"), _mlx)
