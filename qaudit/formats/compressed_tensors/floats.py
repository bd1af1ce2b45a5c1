"""Floats in compressed-tensors files: FP8 by rows, tensors or squares, NVFP4 and MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

from qaudit.core.floats import MX_GROUP, NV_GROUP, Float8Codes, MxFloat4Codes, NvFloat4Codes
from qaudit.formats.arithmetic import in_order, power_of_two, scaled, unpack_fp4, wide
from qaudit.formats.compressed_tensors.integers import groups_of_rows
from qaudit.formats.floats import from_floats
from qaudit.formats.reading import (
    SCALES,
    Layout,
    StoredLinear,
    contradiction,
    group_size,
    must_be_group,
    refused,
)
from qaudit.support.lazy import Tensor, torch


def read_floats(parts: StoredLinear, arguments: Mapping[str, Any]) -> Layout:
    rows, columns = parts.shape(".weight", 2)
    parts.must_hold(".weight_scale", *SCALES)
    shape = parts.infos[".weight_scale"].shape
    structure = arguments.get("block_structure")
    if prod(shape) == 1:
        block = (rows, columns)
    elif isinstance(structure, list) and all(type(one) is int and one > 0 for one in structure):
        if len(structure) != 2:
            raise contradiction(f"`block_structure` is `{str(structure)[:40]}`")
        block = (structure[0], structure[1])
        needed = (-(-rows // block[0]), -(-columns // block[1]))
        parts.must_be(".weight_scale", needed, f"blocks of {block[0]} by {block[1]}")
    else:
        size = group_size(parts, columns, groups_of_rows(parts, rows))
        must_be_group(parts, columns, size, arguments)
        block = (1, size)
    decode = partial(from_floats, parts.name, block, (".weight", ".weight_scale"))
    return Layout((rows, columns), 8, partial(_centered, parts.name, decode))


def _centered(
    name: str, decode: Callable[[Mapping[str, Tensor]], Tensor], read: Mapping[str, Tensor]
) -> Tensor:
    """Decode floats; refuse zero points beside them, which libraries subtract or leave out."""
    zeros = read.get(".weight_zero_point")
    if zeros is not None and bool(zeros.float().any()):
        raise refused(name, "has zero points, and is stored as floats, which have none")
    return decode(read)


def read_fp4(parts: StoredLinear, arguments: Mapping[str, Any]) -> Layout:
    """NVFP4 has 8-bit float scales below a scale of the tensor, MXFP4 exponents."""
    rows, nbytes = parts.shape(".weight_packed", 2)
    columns = 2 * nbytes
    kind = parts.must_hold(".weight_scale", "F8_E4M3", "U8", "F8_E8M0")
    size = NV_GROUP if kind == "F8_E4M3" else MX_GROUP
    if columns % size:
        raise parts.refused(f"has {columns} columns, which groups of {size} do not fill")
    parts.must_be(".weight_scale", (rows, columns // size), f"groups of {size}")
    must_be_group(parts, columns, size, arguments)
    if kind == "F8_E4M3":
        parts.must_hold(".weight_global_scale", "F32")
        if prod(parts.infos[".weight_global_scale"].shape) != 1:
            raise parts.refused("has more than one `weight_global_scale`")
    decode = partial(_decode_fp4, parts.name, size)
    return Layout((rows, columns), 4, partial(_centered, parts.name, decode), size)


def _decode_fp4(name: str, size: int, read: Mapping[str, Tensor]) -> Tensor:
    weight_RC = unpack_fp4(read[".weight_packed"])
    scales_RG = read[".weight_scale"]
    if scales_RG.dtype == torch.float8_e4m3fn:
        whole = wide(read[".weight_global_scale"], name).reshape(())
        if not float(whole):
            raise refused(name, "has a `weight_global_scale` of zero")
        scales_RG = wide(scales_RG, name) / whole
    else:
        scales_RG = power_of_two(scales_RG)
    return scaled(name, weight_RC, scales_RG, in_order(weight_RC.shape[1], size))


def packed_floats(codes: Float8Codes | MxFloat4Codes | NvFloat4Codes) -> dict[str, Tensor]:
    if isinstance(codes, Float8Codes):
        return {"weight": codes.codes_RC, "weight_scale": codes.scales}
    packed = codes.codes_RC[:, ::2] | (codes.codes_RC[:, 1::2] << 4)
    if isinstance(codes, MxFloat4Codes):
        return {"weight_packed": packed, "weight_scale": codes.exponents_RG}
    # The linears of a group share one scale, which each has a copy of in the file.
    parts = {
        "weight_packed": packed,
        "weight_scale": codes.scales_RG,
        "weight_global_scale": codes.tensor_scale.reshape(1).clone(),
    }
    if codes.input_scale is not None:
        parts["input_global_scale"] = codes.input_scale.reshape(1).clone()
    return parts
