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


def value_of(one: Any) -> Any:
    """Return a value that torchao writes under the name of its type."""
    return one.get(DATA) if isinstance(one, Mapping) and TYPE in one else one


def attributes(one: Any) -> Mapping[str, Any]:
    """Return the attributes of an object; none of what is no object."""
    own = value_of(one)
    return own if isinstance(own, Mapping) else {}


def type_of(one: Any) -> str:
    """Return the name of an object's type; nothing of what is no object."""
    return str(one.get(TYPE)) if isinstance(one, Mapping) else ""


def bits_of(dtype: Any) -> int | None:
    """Return the bits of the name of a signed integer, such as `int4`."""
    known = re.fullmatch("int([1-8])", str(value_of(dtype)))
    return int(known[1]) if known else None


def mixed(config: Config) -> bool:
    """Return whether linears have configurations by their names."""
    return type_of(_first(config)) in BY_NAME


def main(config: Config) -> Mapping[str, Any]:
    """Return the configuration of most linears; refuse one that stores tensors of older kinds."""
    own: Any = _first(config)
    if type_of(own) in BY_NAME:
        tables = attributes(own)
        named = tables.get("fqn_to_config") or tables.get("module_fqn_to_config")
        named = named if isinstance(named, Mapping) else {}
        given = [named.get("_default"), *named.values()]
        own = next((one for one in given if isinstance(one, Mapping)), {})
    if not isinstance(own, Mapping) or type_of(own) not in _BITS:
        kind = type_of(own) or str(config.get("quant_type"))
        raise ConfigurationError(
            f"the configuration `{kind[:60]}` of torchao is not read",
            hint=f"these are: {', '.join(_BITS)}, of version {_VERSION}; {INSTEAD}",
        )
    version = own.get("_version")
    if version != _VERSION:
        raise ConfigurationError(
            f"`{type_of(own)}` is of version {str(version)[:20]}, which stores other tensors than "
            f"version {_VERSION}",
            hint=INSTEAD,
        )
    return own


def bits(config: Config) -> int:
    """Return the bits of a code in most linears."""
    own = main(config)
    known = _BITS[type_of(own)]
    if isinstance(known, int):
        return known
    number = bits_of(attributes(own).get(known))
    if number is None:
        raise contradiction(
            f"`{known}` of the quantization configuration is "
            f"`{str(value_of(attributes(own).get(known)))[:40]}`, which is not int1 to int8"
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
