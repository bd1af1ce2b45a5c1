"""8-bit floats with a scale for each row, tensor or block of 128 by 128 (`weight_scale_inv`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from qaudit.checkpoints.quantized.activations import Rounding, of_fp8
from qaudit.checkpoints.quantized.format import Format, Layout, Parts, contradiction

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("F8_E4M3", "F8_E5M2")
_SCALES = (".weight_scale_inv", ".weight_scale")


def layout(parts: Parts) -> Layout:
    """Find the blocks that scales are for by their number."""
    parts.must_hold(".weight", *FLOATS)
    rows, columns = parts.shape(".weight", 2)
    suffix = next((one for one in _SCALES if one in parts.infos), _SCALES[0])
    if suffix not in parts.infos:
        raise parts.refused("has no `weight_scale_inv` and no `weight_scale`")
    parts.must_hold(suffix, "F32", "BF16", "F16", "F8_E8M0")
    decode = partial(_decode, parts.name, _block(parts, suffix), suffix)
    rounding = of_fp8(parts.config)
    known = rounding.of(parts) if isinstance(rounding, Rounding) else None
    return Layout((rows, columns), 8, decode, rounding=known)


def _block(parts: Parts, suffix: str) -> tuple[int, int]:
    """Return the rows and columns that share a scale."""
    rows, columns = parts.shape(".weight", 2)
    shape = tuple(parts.infos[suffix].shape)
    if shape in ((), (1,)):
        return rows, columns
    if shape in ((rows,), (rows, 1)):
        return 1, columns
    size = parts.config.get("weight_block_size") or (128, 128)
    if len(size) != 2 or not all(isinstance(one, int) and one > 0 for one in size):
        raise contradiction(f"`weight_block_size` is `{str(size)[:40]}`, which is no pair of sizes")
    needed = (-(-rows // size[0]), -(-columns // size[1]))
    parts.must_be(suffix, needed, f"blocks of {size[0]} by {size[1]}")
    return int(size[0]), int(size[1])


def _decode(name: str, block: tuple[int, int], suffix: str, read: Mapping[str, Tensor]) -> Tensor:
    return in_blocks(name, read[".weight"].float(), read[suffix], block)


def in_blocks(name: str, weight_RC: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply a weight by the scales of its blocks; those at the ends may be smaller."""
    import torch

    from qaudit.checkpoints.quantized.arithmetic import in_order, power_of_two, scaled

    rows, columns = weight_RC.shape
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = power_of_two(scales)
    scales = scales.reshape(-(-rows // block[0]), -(-columns // block[1]))
    scales_RG = scales.index_select(0, in_order(rows, block[0]))
    return scaled(name, weight_RC, scales_RG, in_order(columns, block[1]))


FORMAT = Format(
    "fp8",
    _SCALES,
    (".weight", *_SCALES, ".activation_scale", ".input_scale"),
    layout,
    ignored=(".input_scale_ub",),
)
