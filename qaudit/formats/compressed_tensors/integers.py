"""Integers in compressed-tensors files: codes packed in words, and whole bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from qaudit.core.stored import IntegerCodes
from qaudit.formats.arithmetic import (
    in_order,
    indexed,
    must_be_symmetric,
    pack,
    scaled,
    unpack,
    unpack_padded,
)
from qaudit.formats.reading import (
    SCALES,
    Layout,
    StoredLinear,
    contradiction,
    group_size,
    must_be_group,
    whole_number,
)
from qaudit.support.lazy import Tensor, torch


def read_words(parts: StoredLinear, arguments: Mapping[str, Any]) -> Layout:
    bits = whole_number(arguments, "num_bits", low=1, high=8)
    if bits is None or bits < 2:
        raise contradiction(f"the group of `{parts.name}` packs {bits} bits; 2 to 8 are read")
    parts.must_hold(".weight_scale", *SCALES)
    rows, words = parts.shape(".weight_packed", 2)
    groups = groups_of_rows(parts, rows)
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
    if ".weight_g_idx" in parts.infos:
        parts.must_be(".weight_g_idx", (columns,), "`weight_packed`")
    elif arguments.get("actorder") in ("group", "dynamic"):
        raise parts.refused("has no `weight_g_idx`, and the configuration orders columns by group")
    size, symmetric = _group(parts, columns, groups, arguments)
    shape = (bits, dense, rows, columns, size)
    decode = partial(_decode_words, parts.name, shape, symmetric)
    return Layout((rows, columns), bits, decode, size)


def groups_of_rows(parts: StoredLinear, rows: int) -> int:
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


def _shape(parts: StoredLinear, rows: int) -> int:
    """Return the columns of packed words, which are stored beside them."""
    parts.must_hold(".weight_shape", "I64", "I32")
    parts.must_be(".weight_shape", (2,), "a matrix")
    raw = parts.raw(".weight_shape")
    stored = [int.from_bytes(raw[at : at + len(raw) // 2], "little") for at in (0, len(raw) // 2)]
    if stored[0] != rows or not 0 < stored[1] < 1 << 40:
        raise parts.refused(f"has a `weight_shape` of {stored}, and {rows} rows of words")
    return stored[1]


def _group(
    parts: StoredLinear, columns: int, groups: int, arguments: Mapping[str, Any]
) -> tuple[int, bool]:
    """Return the columns of a group, and whether zero points are in the middle."""
    symmetric = bool(arguments.get("symmetric", True))
    if not symmetric and ".weight_zero_point" not in parts.infos:
        raise parts.refused("has no `weight_zero_point`, and the configuration has zero points")
    size = group_size(parts, columns, groups)
    must_be_group(parts, columns, size, arguments)
    return size, symmetric


def read_bytes(parts: StoredLinear, arguments: Mapping[str, Any]) -> Layout:
    parts.must_hold(".weight_scale", *SCALES)
    rows, columns = parts.shape(".weight", 2)
    groups = groups_of_rows(parts, rows)
    if ".weight_zero_point" in parts.infos:
        parts.must_hold(".weight_zero_point", "I8", "I32")
        zeros, scales = (parts.infos[f".weight_{one}"].shape for one in ("zero_point", "scale"))
        if prod(zeros) != prod(scales):
            raise parts.refused("has another number of zero points than of scales")
    size, symmetric = _group(parts, columns, groups, arguments)
    return Layout((rows, columns), 8, partial(_decode_bytes, parts.name, size, symmetric), size)


def _decode_words(
    name: str, shape: tuple[int, bool, int, int, int], symmetric: bool, read: Mapping[str, Tensor]
) -> Tensor:
    bits, dense, rows, columns, size = shape
    codes, middle = unpack if dense else unpack_padded, 2 ** (bits - 1)
    centered_RC = codes(read[".weight_packed"], bits, columns).float().sub_(middle)
    zeros_RG = None
    if ".weight_zero_point" in read:
        words_GW = read[".weight_zero_point"].T.contiguous()
        zeros_RG = codes(words_GW, bits, rows).T.float() - middle
    scales_RG = _rows(read[".weight_scale"], read[".weight_scale"], rows)
    group_of_C = in_order(columns, size)
    order = read.get(".weight_g_idx")
    if order is not None and int(order.max()) >= 0:  # -1 everywhere: no order
        group_of_C = indexed(name, order, scales_RG.shape[1])
    return _decoded(name, centered_RC, zeros_RG, scales_RG, group_of_C, symmetric)


def _decode_bytes(name: str, size: int, symmetric: bool, read: Mapping[str, Tensor]) -> Tensor:
    centered_RC = read[".weight"].float()
    rows, columns = centered_RC.shape
    scales, zeros = read[".weight_scale"], read.get(".weight_zero_point")
    zeros_RG = None if zeros is None else _rows(zeros.float(), scales, rows)
    scales_RG = _rows(scales, scales, rows)
    return _decoded(name, centered_RC, zeros_RG, scales_RG, in_order(columns, size), symmetric)


def _rows(values: Tensor, scales: Tensor, rows: int) -> Tensor:
    """Return a value of each row and group; one scale of the whole tensor is that of every row."""
    groups = scales.shape[1] if scales.dim() > 1 else 1
    return values.reshape(-1, groups).expand(rows, -1)


def _decoded(
    name: str,
    centered_RC: Tensor,
    zeros_RG: Tensor | None,
    scales_RG: Tensor,
    group_of_C: Tensor,
    symmetric: bool,
) -> Tensor:
    if zeros_RG is not None:
        if symmetric:
            must_be_symmetric(name, "`symmetric: true`", zeros_RG)
        centered_RC.sub_(zeros_RG.index_select(1, group_of_C))
    return scaled(name, centered_RC, scales_RG, group_of_C)


def words(codes: IntegerCodes) -> dict[str, Tensor]:
    parts = {
        "weight_packed": pack(codes.codes_RC.cpu(), codes.bits),
        "weight_scale": codes.scales_RG,
        "weight_shape": torch.tensor(codes.codes_RC.shape, dtype=torch.int64),
    }
    if codes.zeros_RG is not None:
        zeros_GR = codes.zeros_RG.cpu().T.contiguous()
        parts["weight_zero_point"] = pack(zeros_GR, codes.bits).T
    return parts


def signed_bytes(codes: IntegerCodes) -> dict[str, Tensor]:
    signed_RC = (codes.codes_RC.to(torch.int16) - 2 ** (codes.bits - 1)).to(torch.int8)
    return {"weight": signed_RC, "weight_scale": codes.scales_RG}
