"""Tensors of torchao's own types in safetensors files, as torchao 0.15 and later write them.

A linear is several plain tensors (`._weight_qdata`, `._weight_scale`, ...). Under its dense name
the header of the file holds a JSON text: the type, its attributes, and which tensors there are.
These descriptions are data: they choose one of the functions here, and no class is built of them.

Shapes: R output rows, C input columns, G groups of columns; blocks of rows and columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from qaudit.errors import ConfigurationError
from qaudit.formats.activations import Rounding
from qaudit.formats.arithmetic import in_order, must_be_symmetric, scaled, wide
from qaudit.formats.floats import FLOATS, from_floats, in_blocks
from qaudit.formats.reading import (
    SCALES,
    Config,
    Layout,
    Reader,
    StoredLinear,
    contradiction,
    refused,
)
from qaudit.support.lazy import Tensor, torch
from qaudit_torchao import configuration

if TYPE_CHECKING:
    from qaudit.checkpoints.safetensors import WeightFolder

_PREFIX = "._weight_"
_QDATA, _SCALE, _ZERO = (_PREFIX + part for part in ("qdata", "scale", "zero_point"))
_PRE_SCALE = "act_pre_scale"
_SUFFIXES = (
    _QDATA, _SCALE, _ZERO,
    *(_PREFIX + part for part in (_PRE_SCALE, "act_quant_scale", "act_quant_zero_point")),
)  # fmt: skip
_TENSORS = "described tensors"  # key of what the headers add to a configuration
Block = tuple[int, int]


@dataclass(frozen=True)
class _Description:
    """What a header says of one tensor."""

    type: str
    data: Mapping[str, Any]
    parts: frozenset[str]


def describe(files: WeightFolder, config: Config) -> Config:
    """Return the configuration with the headers' descriptions; refuse what is not read."""
    tensors = {}
    for name, text in files.metadata().items():
        description = _description(text)
        if description is not None and description.type != "Tensor":
            _must_be_read(files, config, name, description.type)
            tensors[name] = description
    if not configuration.mixed(config):
        planned = configuration.rounding_of(config)
        for name, description in tensors.items():
            _must_agree(
                name,
                planned,
                configuration.rounding_of_tensor(description.data, description.parts),
            )
    return {**config, _TENSORS: tensors}


def _must_agree(name: str, planned: Rounding | str | None, found: Rounding | str | None) -> None:
    if planned != found and not (isinstance(planned, str) and isinstance(found, str)):
        raise contradiction(
            f"the quantization configuration rounds activations as {_words(planned)}, "
            f"and the header of `{name}` as {_words(found)}"
        )


def _words(rounding: Rounding | str | None) -> str:
    return f"`{rounding.kind if isinstance(rounding, Rounding) else rounding or 'none'}`"


def _description(text: str) -> _Description | None:
    try:
        table = json.loads(text)
        kind, parts = table["_type"], table.get("_tensor_data_names", [])
        data = table.get("_data", {})
        return _Description(str(kind), dict(data), frozenset(map(str, parts)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _must_be_read(files: WeightFolder, config: Config, name: str, kind: str) -> None:
    if kind not in _TYPES:
        raise ConfigurationError(
            f"`{name}` is stored as `{kind[:60]}` of torchao, which is not read",
            hint=f"these are: {', '.join(_TYPES)}; {configuration.INSTEAD}",
        )
    base = name.removesuffix(".weight")
    if base == name:
        raise ConfigurationError(
            f"`{name}` is quantized by torchao, and is no `.weight` of a linear",
            hint="quantize linears alone",
        )
    if base + _QDATA in files.infos:
        return
    if f"{name}:qdata" in files.infos:
        table = configuration.main(config)
        raise ConfigurationError(
            f"`{name}:qdata` is a name of torchao 0.14, whose layout is not read "
            f"(`{configuration.type_of(table)}` of version {table['_version']})",
            hint=configuration.INSTEAD,
        )
    raise refused(name, "has no `qdata`, which its description names")


def layout(parts: StoredLinear) -> Layout:
    """Choose how a linear is decoded by its description, and check its parts against that."""
    description: _Description | None = parts.config[_TENSORS].get(parts.name)
    if description is None:
        raise parts.refused("has tensors of torchao, and no description in the header")
    stored = {suffix.removeprefix(_PREFIX) for suffix in parts.infos}
    if stored != description.parts:
        raise parts.refused(
            f"is stored as {', '.join(sorted(stored))}, and its description names "
            f"{', '.join(sorted(description.parts))[:80] or 'nothing'}"
        )
    if _PRE_SCALE in stored:
        raise ConfigurationError(
            f"`{parts.name}` multiplies what it reads by a scale (`{_PRE_SCALE}`), which is not "
            "read",
            hint="fold the scale into the norm before the linear, and quantize again",
        )
    found = _TYPES[description.type](parts, description.data)
    if not configuration.mixed(parts.config):
        bits = configuration.bits(parts.config)
        if bits != found.bits:
            raise contradiction(
                f"the quantization configuration has {bits} bits, and `{parts.name}` is stored "
                f"in {found.bits}"
            )
    rounding = configuration.rounding_of_tensor(description.data, description.parts)
    if isinstance(rounding, str):
        return replace(found, left=rounding)
    return replace(found, rounding=rounding)


def _block(parts: StoredLinear, data: Mapping[str, Any], shape: tuple[int, ...]) -> Block:
    block = data.get("block_size") or list(shape)
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(side) is int and side > 0 for side in block)
    ):
        raise parts.refused(f"has a `block_size` of `{str(block)[:40]}`, which is no pair of sizes")
    if shape[0] % block[0] or shape[1] % block[1]:
        raise parts.refused(
            f"has blocks of {block[0]} by {block[1]}, which do not divide {list(shape)}"
        )
    return block[0], block[1]


def _in_blocks(parts: StoredLinear, data: Mapping[str, Any], *suffixes: str) -> tuple[Block, Block]:
    rows, columns = parts.shape(_QDATA, 2)
    block = _block(parts, data, (rows, columns))
    for suffix in suffixes:
        needed = (rows // block[0], columns // block[1])
        parts.must_be(suffix, needed, f"a block of {block[0]} by {block[1]}")
    return (rows, columns), block


def _float8(parts: StoredLinear, data: Mapping[str, Any]) -> Layout:
    parts.must_hold(_QDATA, *FLOATS)
    parts.must_hold(_SCALE, *SCALES)
    shape, block = _in_blocks(parts, data, _SCALE)
    return Layout(shape, 8, partial(from_floats, parts.name, block, (_QDATA, _SCALE)))


def _intx(parts: StoredLinear, data: Mapping[str, Any]) -> Layout:
    bits = configuration.bits_of(data.get("target_dtype"))
    if bits is None:
        kind = str(configuration.value_of(data.get("target_dtype")))
        raise parts.refused(f"has codes of `{kind[:40]}`, which is not int1 to int8")
    parts.shape(_ZERO, 2)
    return _integers(parts, data, bits)


def _integers(parts: StoredLinear, data: Mapping[str, Any], bits: int) -> Layout:
    parts.must_hold(_QDATA, "I8")
    parts.must_hold(_SCALE, *SCALES)
    zeros = (_ZERO,) if _ZERO in parts.infos else ()
    for suffix in zeros:
        parts.must_hold(suffix, "I8")
    shape, block = _in_blocks(parts, data, _SCALE, *zeros)
    size = block[1] if block[0] == 1 else 0
    symmetric = configuration.is_symmetric(parts.config)
    return Layout(shape, bits, partial(_affine, parts.name, block, bits, symmetric), size=size)


def _int4(parts: StoredLinear, data: Mapping[str, Any]) -> Layout:
    """Return the layout of packed codes; a scale and a zero point of a group are of columns."""
    parts.must_hold(_QDATA, "I8", "U8")
    rows, nbytes = parts.shape(_QDATA, 2)
    shape = (rows, nbytes * 2)
    if data.get("shape") != list(shape):
        raise parts.refused(
            f"has a shape of `{str(data.get('shape'))[:40]}` by its description, and its codes "
            f"one of {list(shape)}"
        )
    block = _block(parts, data, shape)
    if block[0] != 1:
        raise parts.refused(f"has blocks of {block[0]} rows, where the format has one")
    for suffix in (_SCALE, _ZERO):
        parts.must_hold(suffix, *SCALES)
        parts.must_be(suffix, (shape[1] // block[1], rows), f"a group of {block[1]} columns")
    return Layout(shape, 4, partial(_packed, parts.name, block[1]), size=block[1])


def _affine(
    name: str, block: Block, bits: int, symmetric: bool, read: Mapping[str, Tensor]
) -> Tensor:
    lowest, highest = (int(bound) for bound in torch.aminmax(read[_QDATA]))
    bound = 2 ** (bits - 1)
    if lowest < -bound or highest >= bound:
        wrong = lowest if lowest < -bound else highest
        raise refused(name, f"has a code of {wrong}, and {bits} bits")
    centered_RC = read[_QDATA].float()
    if _ZERO in read:
        if symmetric:
            must_be_symmetric(name, "a mapping that is `SYMMETRIC`", read[_ZERO])
        down, across = read[_ZERO].shape
        blocks = centered_RC.view(down, block[0], across, block[1])
        blocks -= read[_ZERO].float()[:, None, :, None]
    return in_blocks(name, centered_RC, read[_SCALE], block)


def _packed(name: str, size: int, read: Mapping[str, Tensor]) -> Tensor:
    """Unpack two codes of a byte, the first column in the low half: code * scale + zero point."""
    raw = read[_QDATA].view(torch.uint8)
    halves_RC = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(1)
    codes_RC = (halves_RC ^ 8).float() - 8  # two's complement
    group_of_C = in_order(codes_RC.shape[1], size)
    zeros_RG = wide(read[_ZERO], name).T
    weight_RC = scaled(name, codes_RC, read[_SCALE].T, group_of_C)
    return weight_RC.add_(zeros_RG.index_select(1, group_of_C))


_TYPES: Mapping[str, Callable[[StoredLinear, Mapping[str, Any]], Layout]] = {
    "Float8Tensor": _float8,
    "Int8Tensor": partial(_integers, bits=8),
    "Int4Tensor": _int4,
    "IntxUnpackedToInt8Tensor": _intx,
}

FORMAT = Reader(
    "torchao",
    (_QDATA,),
    _SUFFIXES,
    layout,
    bits=configuration.bits,
    rounding=configuration.rounding_of,
    prepare=describe,
)
