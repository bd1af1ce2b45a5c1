"""The experts of gpt-oss: 4-bit floats in blocks of 32 with an exponent each, columns first."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from qaudit.checkpoints.quantized.format import Format, Layout, Parts

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 32


def layout(parts: Parts) -> Layout:
    """Return the shape of a model's parameter: experts, columns, rows."""
    parts.must_hold("_blocks", "U8")
    parts.must_hold("_scales", "U8")
    experts, rows, blocks, nbytes = parts.shape("_blocks", 4)
    parts.must_be("_scales", (experts, rows, blocks), "`blocks`")
    if nbytes != _BLOCK // 2:
        raise parts.refused(f"has blocks of {nbytes} bytes, where 32 codes take 16")
    return Layout((experts, blocks * _BLOCK, rows), 4, partial(_decode, parts.name))


def _decode(name: str, read: Mapping[str, Tensor]) -> Tensor:
    from qaudit.checkpoints.quantized.arithmetic import power_of_two, unpack_fp4, wide

    scales = wide(power_of_two(read["_scales"]), name)
    return (unpack_fp4(read["_blocks"]) * scales[..., None]).flatten(2).transpose(1, 2).contiguous()


FORMAT = Format("mxfp4", ("_blocks",), ("_blocks", "_scales"), layout, dense="")
