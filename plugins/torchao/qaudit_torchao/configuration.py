"""What `config.json` says of a model that torchao quantized: version, bits, activations."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from qaudit.errors import ConfigurationError
from qaudit.formats.activations import Rounding
from qaudit.formats.reading import Config, contradiction

TYPE, DATA = "_type", "_data"
BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
INSTEAD = "save it as compressed-tensors, or dequantized, or with torchao 0.15 or later"
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


def value_of(value: Any) -> Any:
    """Return a value that torchao writes under the name of its type."""
    return value.get(DATA) if isinstance(value, Mapping) and TYPE in value else value


def attributes(value: Any) -> Mapping[str, Any]:
    inner = value_of(value)
    return inner if isinstance(inner, Mapping) else {}


def type_of(value: Any) -> str:
    return str(value.get(TYPE)) if isinstance(value, Mapping) else ""


def bits_of(dtype: Any) -> int | None:
    """Return the bits of the name of a signed integer, such as `int4`."""
    match = re.fullmatch("int([1-8])", str(value_of(dtype)))
    return int(match[1]) if match else None


def mixed(config: Config) -> bool:
    return type_of(_first(config)) in BY_NAME


def main(config: Config) -> Mapping[str, Any]:
    """Return the configuration of most linears; refuse one that stores tensors of older kinds."""
    table: Any = _first(config)
    if type_of(table) in BY_NAME:
        tables = attributes(table)
        named = tables.get("fqn_to_config") or tables.get("module_fqn_to_config")
        named = named if isinstance(named, Mapping) else {}
        given = [named.get("_default"), *named.values()]
        table = next((entry for entry in given if isinstance(entry, Mapping)), {})
    if not isinstance(table, Mapping) or type_of(table) not in _BITS:
        kind = type_of(table) or str(config.get("quant_type"))
        raise ConfigurationError(
            f"the configuration `{kind[:60]}` of torchao is not read",
            hint=f"these are: {', '.join(_BITS)}, of version {_VERSION}; {INSTEAD}",
        )
    version = table.get("_version")
    if version != _VERSION:
        raise ConfigurationError(
            f"`{type_of(table)}` is of version {str(version)[:20]}, which stores other tensors "
            f"than version {_VERSION}",
            hint=INSTEAD,
        )
    return table


def bits(config: Config) -> int:
    table = main(config)
    bits = _BITS[type_of(table)]
    if isinstance(bits, int):
        return bits
    number = bits_of(attributes(table).get(bits))
    if number is None:
        raise contradiction(
            f"`{bits}` of the quantization configuration is "
            f"`{str(value_of(attributes(table).get(bits)))[:40]}`, which is not int1 to int8"
        )
    return number


def is_symmetric(config: Config) -> bool:
    data = attributes(None if mixed(config) else main(config))
    mapping = data.get("weight_mapping_type") or data.get("mapping_type")
    return str(value_of(mapping)).startswith("SYMMETRIC")


def rounding_of(config: Config) -> Rounding | str | None:
    """Return the rounding of most linears by the configuration."""
    table = main(config)
    data, kind = attributes(table), type_of(table)
    if kind.endswith("WeightOnlyConfig"):
        return None
    if kind == "Int8DynamicActivationInt8WeightConfig":
        return _int8(data, data.get("act_mapping_type"))
    if kind == "Float8DynamicActivationFloat8WeightConfig":
        bounds = (data.get("activation_value_lb"), data.get("activation_value_ub"))
        return _fp8(data, data.get("activation_dtype"), *bounds)
    return "8-bit int, asymmetric by token"


def rounding_of_tensor(data: Mapping[str, Any], parts: Collection[str]) -> Rounding | str | None:
    if data.get("activation_quantization") is not None:
        return f"{str(data['activation_quantization'])[:40]}"
    if str(value_of(data.get("activation_dtype"))).startswith("float8"):
        return "8-bit float before 4-bit weights"
    arguments = data.get("act_quant_kwargs")
    if arguments is None:
        return None
    if "act_quant_scale" in parts:
        return "fixed scales of torchao"
    table = attributes(arguments)
    if type_of(arguments) == "QuantizeTensorToInt8Kwargs":
        return _int8(table, table.get("mapping_type"))
    if type_of(arguments) == "QuantizeTensorToFloat8Kwargs":
        bounds = (table.get("hp_value_lb"), table.get("hp_value_ub"))
        return _fp8(table, table.get("float8_dtype"), *bounds)
    return type_of(arguments)[:40] or "an unnamed kind"


def _int8(data: Mapping[str, Any], mapping: Any) -> Rounding | str:
    by_token = _by_token(data.get("granularity"))
    if by_token and value_of(mapping) == "SYMMETRIC" and not data.get("reduce_range"):
        return Rounding("int8")
    return "8-bit int, " + ("not symmetric, or of fewer codes" if by_token else "not by token")


def _fp8(data: Mapping[str, Any], dtype: Any, low: object, high: object) -> Rounding | str:
    if not _by_token(data.get("granularity")):
        return "fp8, not by token"
    if value_of(dtype) != "float8_e4m3fn" or low is not None:
        return "fp8, not E4M3, or with a lowest scale"
    if high is None:
        return Rounding("fp8")
    if not isinstance(high, int | float) or not 0 < high < float("inf"):
        raise contradiction(f"the bound of activations is `{str(high)[:40]}`, which is no bound")
    return Rounding("fp8", float(high))


def _by_token(granularity: Any) -> bool:
    """Return whether scales are by row of activations; of a list the first is theirs."""
    first = granularity[0] if isinstance(granularity, list) and granularity else granularity
    last = attributes(first).get("dim", -1) == -1
    return first is None or (type_of(first) == "PerRow" and last)


def _first(config: Config) -> Any:
    kinds = config.get("quant_type")
    return kinds.get("default") if isinstance(kinds, Mapping) else kinds
