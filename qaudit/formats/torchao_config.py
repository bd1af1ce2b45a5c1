"""What `config.json` says of a model that torchao quantized: its version, its bits. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from qaudit.errors import ConfigurationError
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
    """Return the name of an object's type; nothing of what is no object."""
    return str(value.get(TYPE)) if isinstance(value, Mapping) else ""


def bits_of(dtype: Any) -> int | None:
    """Return the bits of the name of a signed integer, such as `int4`."""
    match = re.fullmatch("int([1-8])", str(value_of(dtype)))
    return int(match[1]) if match else None


def mixed(config: Config) -> bool:
    """Return whether linears have configurations by their names."""
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
    """Return whether all linears are quantized without zero points."""
    data = attributes(None if mixed(config) else main(config))
    mapping = data.get("weight_mapping_type") or data.get("mapping_type")
    return str(value_of(mapping)).startswith("SYMMETRIC")


def _first(config: Config) -> Any:
    kinds = config.get("quant_type")
    return kinds.get("default") if isinstance(kinds, Mapping) else kinds
