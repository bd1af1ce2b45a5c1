"""Tensors of torchao's own types in safetensors files, as torchao 0.15 and later write them.

A linear is several plain tensors (`._weight_qdata`, `._weight_scale`, ...). Under its dense name
the header of the file holds a JSON text: the type, its attributes, and which tensors there are.
These descriptions are data: they choose one of the functions here, and no class is built of them.

Shapes: R output rows, C input columns, G groups of columns; blocks of rows and columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from qaudit.errors import ConfigurationError
from qaudit.formats import reading
from qaudit.formats.arithmetic import FLOATS, halves, in_blocks, in_order, scaled, wide
from qaudit.support.lazy import Tensor, torch

if TYPE_CHECKING:
    from qaudit.checkpoints.safetensors import WeightFolder

Table = Mapping[str, Any]

_PREFIX = "._weight_"
_QDATA, _SCALE, _ZERO = (_PREFIX + part for part in ("qdata", "scale", "zero_point"))
_PRE_SCALE = "act_pre_scale"
_SUFFIXES = (
    _QDATA, _SCALE, _ZERO,
    *(_PREFIX + part for part in (_PRE_SCALE, "act_quant_scale", "act_quant_zero_point")),
)  # fmt: skip
_TENSORS = "described tensors"  # key of what the headers add to a configuration
_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
_INSTEAD = "save it as compressed-tensors, or dequantized, or with torchao 0.15 or later"
_VERSION = 2  # of the configurations whose tensors are stored in safetensors files
_BITS: Mapping[str, int | str] = {  # or the attribute that names a dtype
    "Int8WeightOnlyConfig": 8,
    "Int8DynamicActivationInt8WeightConfig": 8,
    "Float8WeightOnlyConfig": 8,
    "Float8DynamicActivationFloat8WeightConfig": 8,
    "Int4WeightOnlyConfig": 4,
    "IntxWeightOnlyConfig": "weight_dtype",
    "Int8DynamicActivationIntxWeightConfig": "weight_dtype",
}

Block = tuple[int, int]


def _value(value: Any) -> Any:
    """Return a value that torchao writes under the name of its type."""
    return value.get("_data") if isinstance(value, Mapping) and "_type" in value else value


def _attributes(value: Any) -> Table:
    return inner if isinstance(inner := _value(value), Mapping) else {}


def _type(value: Any) -> str:
    return str(value.get("_type")) if isinstance(value, Mapping) else ""


def _bits_of(dtype: Any) -> int | None:
    """Return the bits of the name of a signed integer, such as `int4`."""
    match = re.fullmatch("int([1-8])", str(_value(dtype)))
    return int(match[1]) if match else None


def _first(config: reading.Config) -> Any:
    kinds = config.get("quant_type")
    return kinds.get("default") if isinstance(kinds, Mapping) else kinds


def _is_mixed(config: reading.Config) -> bool:
    return _type(_first(config)) in _BY_NAME


def _main(config: reading.Config) -> Table:
    """Return the configuration of most linears; refuse one that stores tensors of older kinds."""
    table: Any = _first(config)
    if _is_mixed(config):
        tables = _attributes(table)
        named = tables.get("fqn_to_config") or tables.get("module_fqn_to_config")
        named = named if isinstance(named, Mapping) else {}
        given = [named.get("_default"), *named.values()]
        table = next((entry for entry in given if isinstance(entry, Mapping)), {})
    if not isinstance(table, Mapping) or _type(table) not in _BITS:
        kind = _type(table) or str(config.get("quant_type"))
        raise ConfigurationError(
            f"the configuration `{kind[:60]}` of torchao is not read",
            hint=f"these are: {', '.join(_BITS)}, of version {_VERSION}; {_INSTEAD}",
        )
    version = table.get("_version")
    if version != _VERSION:
        raise ConfigurationError(
            f"`{_type(table)}` is of version {str(version)[:20]}, which stores other tensors "
            f"than version {_VERSION}",
            hint=_INSTEAD,
        )
    return table


def bits(config: reading.Config) -> int:
    table = _main(config)
    key = _BITS[_type(table)]
    if isinstance(key, int):
        return key
    dtype = _attributes(table).get(key)
    if (number := _bits_of(dtype)) is None:
        raise reading.contradiction(
            f"`{key}` of the quantization configuration is `{str(_value(dtype))[:40]}`, which is "
            "not int1 to int8"
        )
    return number


def rounding_of(config: reading.Config) -> reading.Rounding | str | None:
    """Return the rounding of most linears by the configuration."""
    table = _main(config)
    data, kind = _attributes(table), _type(table)
    if kind.endswith("WeightOnlyConfig"):
        return None
    if kind == "Int8DynamicActivationInt8WeightConfig":
        return _int8_rounding(data, data.get("act_mapping_type"))
    if kind == "Float8DynamicActivationFloat8WeightConfig":
        return _fp8_rounding(data, "activation_dtype", "activation_value")
    return "8-bit int, asymmetric by token"


def rounding_of_tensor(data: Table, parts: Collection[str]) -> reading.Rounding | str | None:
    if data.get("activation_quantization") is not None:
        return f"{str(data['activation_quantization'])[:40]}"
    if str(_value(data.get("activation_dtype"))).startswith("float8"):
        return "8-bit float before 4-bit weights"
    arguments = data.get("act_quant_kwargs")
    if arguments is None:
        return None
    if "act_quant_scale" in parts:
        return "fixed scales of torchao"
    table, kind = _attributes(arguments), _type(arguments)
    if kind == "QuantizeTensorToInt8Kwargs":
        return _int8_rounding(table, table.get("mapping_type"))
    if kind == "QuantizeTensorToFloat8Kwargs":
        return _fp8_rounding(table, "float8_dtype", "hp_value")
    return kind[:40] or "an unnamed kind"


def _int8_rounding(data: Table, mapping: Any) -> reading.Rounding | str:
    by_token = _is_by_token(data)
    if by_token and _value(mapping) == "SYMMETRIC" and not data.get("reduce_range"):
        return reading.Rounding("int8")
    return "8-bit int, " + ("not symmetric, or of fewer codes" if by_token else "not by token")


def _fp8_rounding(data: Table, dtype: str, bound: str) -> reading.Rounding | str:
    if not _is_by_token(data):
        return "fp8, not by token"
    if _value(data.get(dtype)) != "float8_e4m3fn" or data.get(f"{bound}_lb") is not None:
        return "fp8, not E4M3, or with a lowest scale"
    high = data.get(f"{bound}_ub")
    return reading.Rounding(
        "fp8", None if high is None else reading.bound_of(high, "the bound of activations")
    )


def _is_by_token(data: Table) -> bool:
    """Return whether scales are by row of activations; of a list the first is theirs."""
    kind = data.get("granularity")
    first = kind[0] if isinstance(kind, list) and kind else kind
    return first is None or (_type(first) == "PerRow" and _attributes(first).get("dim", -1) == -1)


@dataclass(frozen=True)
class _Description:
    """What a header says of one tensor."""

    type: str
    data: Table
    parts: frozenset[str]


def describe(files: WeightFolder, config: reading.Config) -> reading.Config:
    """Return the configuration with the headers' descriptions; refuse what is not read."""
    tensors = {}
    for name, text in files.metadata().items():
        try:
            table = json.loads(text)
            parts = frozenset(map(str, table.get("_tensor_data_names", [])))
            description = _Description(str(table["_type"]), dict(table.get("_data", {})), parts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if description.type != "Tensor":
            _must_be_read(files, config, name, description.type)
            tensors[name] = description
    planned = None if _is_mixed(config) else rounding_of(config)
    for name, description in () if _is_mixed(config) else tensors.items():
        stored = rounding_of_tensor(description.data, description.parts)
        if planned != stored and not (isinstance(planned, str) and isinstance(stored, str)):
            ours, theirs = (
                f"`{kind.kind if isinstance(kind, reading.Rounding) else kind or 'none'}`"
                for kind in (planned, stored)
            )
            raise reading.contradiction(
                f"the quantization configuration rounds activations as {ours}, and the header of "
                f"`{name}` as {theirs}"
            )
    return {**config, _TENSORS: tensors}


def _must_be_read(files: WeightFolder, config: reading.Config, name: str, kind: str) -> None:
    base, hint = name.removesuffix(".weight"), _INSTEAD
    if kind not in _LAYOUTS:
        what = f"is stored as `{kind[:60]}` of torchao, which is not read"
        hint = f"these are: {', '.join(_LAYOUTS)}; {_INSTEAD}"
    elif base == name:
        what = "is quantized by torchao, and is no `.weight` of a linear"
        hint = "quantize linears alone"
    elif base + _QDATA in files.infos:
        return
    elif f"{name}:qdata" in files.infos:
        table, name = _main(config), f"{name}:qdata"
        what = (
            "is a name of torchao 0.14, whose layout is not read "
            f"(`{_type(table)}` of version {table['_version']})"
        )
    else:
        raise reading.refused(name, "has no `qdata`, which its description names")
    raise ConfigurationError(f"`{name}` {what}", hint=hint)


def layout(parts: reading.StoredLinear) -> reading.Layout:
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
    linear = _LAYOUTS[description.type](parts, description.data)
    if not _is_mixed(parts.config):
        parts.must_have(linear.bits, bits(parts.config))
    rounding = rounding_of_tensor(description.data, description.parts)
    if isinstance(rounding, str):
        return replace(linear, left=rounding)
    return replace(linear, rounding=rounding)


def _block(parts: reading.StoredLinear, data: Table, shape: Block) -> Block:
    block = data.get("block_size") or list(shape)
    pair = block if isinstance(block, list) and len(block) == 2 else (0, 0)
    if not all(type(side) is int and side > 0 for side in pair):
        raise parts.refused(f"has a `block_size` of `{str(block)[:40]}`, which is no pair of sizes")
    if shape[0] % pair[0] or shape[1] % pair[1]:
        raise parts.refused(
            f"has blocks of {pair[0]} by {pair[1]}, which do not divide {list(shape)}"
        )
    return pair[0], pair[1]


def _blocks(
    parts: reading.StoredLinear, data: Table, codes: tuple[str, ...], **scales: tuple[str, ...]
) -> tuple[Block, Block]:
    rows, columns = parts.sizes({_QDATA: ("R C", codes)}).values()
    block = _block(parts, data, (rows, columns))
    table = {_PREFIX + name: ("D A", dtypes) for name, dtypes in scales.items()}
    because = f"a block of {block[0]} by {block[1]}"
    parts.sizes(table, because, D=rows // block[0], A=columns // block[1])
    return (rows, columns), block


def _float8(parts: reading.StoredLinear, data: Table) -> reading.Layout:
    shape, block = _blocks(parts, data, FLOATS, scale=reading.SCALES)
    return reading.Layout(
        shape, 8, lambda read: in_blocks(parts.name, read[_QDATA], read[_SCALE], block)
    )


def _integers(parts: reading.StoredLinear, data: Table, bits: int) -> reading.Layout:
    zeros = {"zero_point": ("I8",)} if _ZERO in parts.infos else {}
    shape, block = _blocks(parts, data, ("I8",), scale=reading.SCALES, **zeros)
    bound = 2 ** (bits - 1)

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        for code in map(int, torch.aminmax(read[_QDATA])):
            if not -bound <= code < bound:
                raise parts.refused(f"has a code of {code}, and {bits} bits")
        weight_RC = read[_QDATA].float()
        if _ZERO in read:
            table = {} if _is_mixed(parts.config) else _attributes(_main(parts.config))
            mapping = _value(table.get("weight_mapping_type") or table.get("mapping_type"))
            if str(mapping).startswith("SYMMETRIC") and bool(read[_ZERO].any()):
                raise reading.contradiction(
                    "the quantization configuration has a mapping that is `SYMMETRIC`, and "
                    f"`{parts.name}` zero points"
                )
            down, across = read[_ZERO].shape
            blocks = weight_RC.view(down, block[0], across, block[1])
            blocks -= read[_ZERO].float()[:, None, :, None]
        return in_blocks(parts.name, weight_RC, read[_SCALE], block)

    return reading.Layout(shape, bits, decode, size=block[1] if block[0] == 1 else 0)


def _intx(parts: reading.StoredLinear, data: Table) -> reading.Layout:
    bits = _bits_of(data.get("target_dtype"))
    if bits is None:
        kind = str(_value(data.get("target_dtype")))
        raise parts.refused(f"has codes of `{kind[:40]}`, which is not int1 to int8")
    parts.sizes({_ZERO: ("D A", ())})
    return _integers(parts, data, bits)


def _int4(parts: reading.StoredLinear, data: Table) -> reading.Layout:
    """Return the layout of packed codes: code * scale + zero point, both of a group of columns."""
    rows, nbytes = parts.sizes({_QDATA: ("R B", ("I8", "U8"))}).values()
    shape = (rows, nbytes * 2)
    if data.get("shape") != list(shape):
        raise parts.refused(
            f"has a shape of `{str(data.get('shape'))[:40]}` by its description, and its codes "
            f"one of {list(shape)}"
        )
    block = _block(parts, data, shape)
    if block[0] != 1:
        raise parts.refused(f"has blocks of {block[0]} rows, where the format has one")
    size, stored = block[1], {_SCALE: ("G R", reading.SCALES), _ZERO: ("G R", reading.SCALES)}
    parts.sizes(stored, f"a group of {size} columns", G=shape[1] // size, R=rows)

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        codes_RC = (halves(read[_QDATA]) ^ 8).float() - 8  # two's complement
        group_of_C = in_order(shape[1], size)
        zeros_RG = wide(read[_ZERO], parts.name).T
        weight_RC = scaled(parts.name, codes_RC, read[_SCALE].T, group_of_C)
        return weight_RC.add_(zeros_RG.index_select(1, group_of_C))

    return reading.Layout(shape, 4, decode, size=size)


_LAYOUTS: Mapping[str, Callable[[reading.StoredLinear, Table], reading.Layout]] = {
    "Float8Tensor": _float8,
    "Int8Tensor": partial(_integers, bits=8),
    "Int4Tensor": _int4,
    "IntxUnpackedToInt8Tensor": _intx,
}
FORMAT = reading.Reader(
    "torchao",
    (_QDATA,),
    _SUFFIXES,
    layout,
    bits=bits,
    rounding=rounding_of,
    prepare=describe,
)
