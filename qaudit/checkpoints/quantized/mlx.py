"""MLX: affine codes in 32-bit words, a scale and a bias for each group; also of embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from qaudit.checkpoints.quantized.format import (
    Format,
    Layout,
    Parts,
    contradiction,
    group_size,
    whole_number,
)

if TYPE_CHECKING:
    from torch import Tensor


def layout(parts: Parts) -> Layout:
    """Take bits and group from the configuration of this linear, or of all."""
    base = parts.name.removesuffix(".weight")
    own = parts.config.get(base)
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
        parts.must_hold(suffix, "F16", "BF16", "F32")
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
    return Layout((rows, columns), bits, partial(_decode, parts.name, bits, size), size)


def _decode(name: str, bits: int, size: int, read: Mapping[str, Tensor]) -> Tensor:
    import torch

    from qaudit.checkpoints.quantized.arithmetic import in_order, wide
    from qaudit.checkpoints.quantized.packing import unpack

    words_RW = read[".weight"].view(torch.int32)
    columns = words_RW.shape[1] * 32 // bits
    group_of_C = in_order(columns, size)
    scales_RG, biases_RG = wide(read[".scales"], name), wide(read[".biases"], name)
    weight_RC = unpack(words_RW, bits, columns).float()
    weight_RC.mul_(scales_RG.index_select(1, group_of_C))
    return weight_RC.add_(biases_RG.index_select(1, group_of_C))


FORMAT = Format("mlx", (".scales",), (".weight", ".scales", ".biases"), layout)
