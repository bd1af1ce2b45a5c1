"""compressed-tensors: integers of 2 to 8 bits, 8-bit floats, NVFP4 and MXFP4.

What a linear is follows from its tensors: packed words of integers, packed halves of 4-bit
floats, or whole 8-bit numbers. The configuration's groups say how many bits the words have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from qaudit.checkpoints.quantized.activations import Rounding, of_group
from qaudit.checkpoints.quantized.arithmetic import (
    in_order,
    indexed,
    power_of_two,
    scaled,
    unpack,
    unpack_fp4,
    unpack_padded,
    wide,
)
from qaudit.checkpoints.quantized.floats import FLOATS, from_floats
from qaudit.checkpoints.quantized.format import (
    SCALES,
    Format,
    Layout,
    Parts,
    contradiction,
    group_size,
    must_be_group,
    refused,
    whole_number,
)

if TYPE_CHECKING:
    from torch import Tensor

_NVFP4_GROUP, _MXFP4_GROUP = 16, 32
_CLASSES = frozenset({"Linear", "Embedding"})
"""What a group's `targets` names for all modules that no other group names."""


def layout(parts: Parts) -> Layout:
    """Tell the formats apart by the dtypes of their tensors."""
    group = _group(parts)
    rounding = of_group(group)
    known = rounding.of(parts) if isinstance(rounding, Rounding) else None
    stored = _stored(parts, group["weights"])
    planned = whole_number(group["weights"], "num_bits", low=1, high=16)
    if planned not in (None, stored.bits):
        raise contradiction(
            f"the quantization configuration has {planned} bits, and `{parts.name}` is stored "
            f"in {stored.bits}"
        )
    return replace(stored, rounding=known)


def _stored(parts: Parts, arguments: Mapping[str, Any]) -> Layout:
    if ".weight_packed" not in parts.infos:
        if parts.must_hold(".weight", "I8", *FLOATS) == "I8":
            return _bytes(parts, arguments)
        return _floats(parts, arguments)
    if parts.must_hold(".weight_packed", "I32", "U8") == "U8":
        return _fp4(parts)
    return _integers(parts, arguments)


def _group(parts: Parts) -> Mapping[str, Any]:
    """Return the group that a linear belongs to, with its table of `weights`."""
    base = parts.name.removesuffix(".weight")
    groups = parts.config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise contradiction("the quantization configuration has no `config_groups`")
    ignored = parts.config.get("ignore")
    if any(_names(base, one) for one in (ignored if isinstance(ignored, list) else ())):
        raise contradiction(f"`ignore` names `{base[:60]}`, whose weight is stored quantized")
    tables = [group for group in groups.values() if isinstance(group, Mapping)]
    named = [group for group in tables if any(_names(base, one) for one in _targets(group))]
    of_class = [group for group in tables if _CLASSES.intersection(map(str, _targets(group)))]
    for group in named or of_class:
        if isinstance(group.get("weights"), Mapping):
            return group
    raise contradiction(
        f"no group of the quantization configuration has `targets` for `{base[:60]}`, whose "
        "weight is stored quantized"
    )


def _targets(group: Mapping[str, Any]) -> list[Any]:
    targets = group.get("targets")
    return targets if isinstance(targets, list) else []


def _names(base: str, target: object) -> bool:
    """Return whether a target is the name of a linear or a pattern of it, and no class."""
    pattern = str(target).removeprefix("re:")
    if pattern == str(target):
        return pattern == base
    try:
        return re.match(pattern, base) is not None
    except re.error as error:
        raise contradiction(f"`{pattern[:60]}` is no pattern: {error}") from error


# ------------------------------------------------------------------------------- integers


def _integers(parts: Parts, arguments: Mapping[str, Any]) -> Layout:
    bits = whole_number(arguments, "num_bits", low=1, high=8)
    if bits is None or bits < 2:
        raise contradiction(f"the group of `{parts.name}` packs {bits} bits; 2 to 8 are read")
    parts.must_hold(".weight_scale", *SCALES)
    rows, words = parts.shape(".weight_packed", 2)
    groups = _groups(parts, rows)
    columns = _shape(parts, rows)
    dense = -(-columns * bits // 32) == words
    if not dense and -(-columns // (32 // bits)) != words:
        raise contradiction(
            f"the quantization configuration has {bits} bits, and `{parts.name}` has {words} "
            f"words for {columns} columns"
        )
    if ".weight_zero_point" in parts.infos:
        parts.must_hold(".weight_zero_point", "I32")
        packed = -(-rows * bits // 32) if dense else -(-rows // (32 // bits))
        parts.must_be(".weight_zero_point", (packed, groups), "`weight_packed`")
    elif not arguments.get("symmetric", True):
        raise parts.refused("has no `weight_zero_point`, and the configuration has zero points")
    if ".weight_g_idx" in parts.infos:
        parts.must_be(".weight_g_idx", (columns,), "`weight_packed`")
    size = group_size(parts, columns, groups)
    must_be_group(parts, columns, size, arguments)
    symmetric = bool(arguments.get("symmetric", True))
    shape = (bits, dense, rows, columns, size)
    decode = partial(_decode_integers, parts.name, shape, symmetric)
    return Layout((rows, columns), bits, decode, size)


def _groups(parts: Parts, rows: int) -> int:
    """Return how many scales a row has; a scale of the whole tensor is one of every row."""
    shape = parts.infos[".weight_scale"].shape
    if prod(shape) == 1:
        return 1
    if len(shape) == 1:
        parts.must_be(".weight_scale", (rows,), "`weight_packed`")
        return 1
    groups = parts.shape(".weight_scale", 2)[1]
    parts.must_be(".weight_scale", (rows, groups), "`weight_packed`")
    return groups


def _shape(parts: Parts, rows: int) -> int:
    """Return the columns of packed words, which are stored beside them."""
    parts.must_hold(".weight_shape", "I64", "I32")
    parts.must_be(".weight_shape", (2,), "a matrix")
    raw = parts.raw(".weight_shape")
    stored = [int.from_bytes(raw[at : at + len(raw) // 2], "little") for at in (0, len(raw) // 2)]
    if stored[0] != rows or not 0 < stored[1] < 1 << 40:
        raise parts.refused(f"has a `weight_shape` of {stored}, and {rows} rows of words")
    return stored[1]


def _decode_integers(
    name: str,
    shape: tuple[int, bool, int, int, int],
    symmetric: bool,
    read: Mapping[str, Tensor],
) -> Tensor:
    bits, dense, rows, columns, size = shape
    codes = unpack if dense else unpack_padded
    scales = read[".weight_scale"]
    groups = scales.shape[1] if scales.dim() > 1 else 1
    scales_RG = scales.reshape(-1, groups).expand(rows, -1)
    group_of_C = in_order(columns, size)
    order = read.get(".weight_g_idx")
    if order is not None and int(order.max()) >= 0:  # -1 everywhere: no order
        group_of_C = indexed(name, order, scales_RG.shape[1])
    centered_RC = codes(read[".weight_packed"], bits, columns).float()
    if ".weight_zero_point" in read:
        zeros_RG = codes(read[".weight_zero_point"].T.contiguous(), bits, rows).T.float()
        _must_be_central(name, zeros_RG - 2 ** (bits - 1), symmetric)
        centered_RC.sub_(zeros_RG.index_select(1, group_of_C))
    else:
        centered_RC.sub_(2 ** (bits - 1))
    return scaled(name, centered_RC, scales_RG, group_of_C)


def _must_be_central(name: str, zeros: Tensor, symmetric: bool) -> None:
    """Refuse zero points that libraries leave out, because the configuration has none."""
    if symmetric and bool(zeros.any()):
        raise contradiction(
            f"the quantization configuration is `symmetric`, and `{name}` has zero points"
        )


def _bytes(parts: Parts, arguments: Mapping[str, Any]) -> Layout:
    parts.must_hold(".weight_scale", *SCALES)
    rows, columns = parts.shape(".weight", 2)
    groups = _groups(parts, rows)
    if ".weight_zero_point" in parts.infos:
        parts.must_hold(".weight_zero_point", "I8", "I32")
        if prod(parts.infos[".weight_zero_point"].shape) != prod(
            parts.infos[".weight_scale"].shape
        ):
            raise parts.refused("has another number of zero points than of scales")
    elif not arguments.get("symmetric", True):
        raise parts.refused("has no `weight_zero_point`, and the configuration has zero points")
    size = group_size(parts, columns, groups)
    must_be_group(parts, columns, size, arguments)
    symmetric = bool(arguments.get("symmetric", True))
    return Layout((rows, columns), 8, partial(_decode_bytes, parts.name, size, symmetric), size)


def _decode_bytes(name: str, size: int, symmetric: bool, read: Mapping[str, Tensor]) -> Tensor:
    centered_RC = read[".weight"].float()
    rows, columns = centered_RC.shape
    group_of_C = in_order(columns, size)
    scales = read[".weight_scale"]
    groups = scales.shape[1] if scales.dim() > 1 else 1
    scales_RG = scales.reshape(-1, groups).expand(rows, -1)
    if ".weight_zero_point" in read:
        zeros_RG = read[".weight_zero_point"].float().reshape(-1, groups).expand(rows, -1)
        _must_be_central(name, zeros_RG, symmetric)
        centered_RC.sub_(zeros_RG.index_select(1, group_of_C))
    return scaled(name, centered_RC, scales_RG, group_of_C)


# --------------------------------------------------------------------------------- floats


def _floats(parts: Parts, arguments: Mapping[str, Any]) -> Layout:
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
        block = (1, -(-columns // _groups(parts, rows)))
    decode = partial(from_floats, parts.name, block, (".weight", ".weight_scale"))
    return Layout((rows, columns), 8, decode)


def _fp4(parts: Parts) -> Layout:
    """NVFP4 has 8-bit float scales below a scale of the tensor, MXFP4 exponents."""
    rows, nbytes = parts.shape(".weight_packed", 2)
    columns = 2 * nbytes
    kind = parts.must_hold(".weight_scale", "F8_E4M3", "U8", "F8_E8M0")
    size = _NVFP4_GROUP if kind == "F8_E4M3" else _MXFP4_GROUP
    parts.must_be(".weight_scale", (rows, -(-columns // size)), f"groups of {size}")
    if kind == "F8_E4M3":
        parts.must_hold(".weight_global_scale", "F32")
        if prod(parts.infos[".weight_global_scale"].shape) != 1:
            raise parts.refused("has more than one `weight_global_scale`")
    return Layout((rows, columns), 4, partial(_decode_fp4, parts.name, size), size)


def _decode_fp4(name: str, size: int, read: Mapping[str, Tensor]) -> Tensor:
    import torch

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


FORMAT = Format(
    "compressed-tensors",
    (".weight_packed", ".weight_scale"),
    (
        ".weight", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape",
        ".weight_g_idx", ".weight_global_scale", ".input_scale", ".input_global_scale",
    ),
    layout,
    ignored=(".input_zero_point", ".output_scale", ".k_scale", ".v_scale"),
)  # fmt: skip
