"""The groups of linears in a configuration of compressed-tensors, and which linear is in which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qaudit.formats.activations import Kind, Rounding
from qaudit.formats.reading import Config, StoredLinear, bits_in, contradiction, matches

_CLASSES = frozenset({"Linear", "Embedding"})
"""What a group's `targets` names for all modules that no other group names."""


def group_of(parts: StoredLinear) -> Mapping[str, Any]:
    base = parts.name.removesuffix(".weight")
    tables = _groups_of(parts.config)
    if not tables:
        raise contradiction("the quantization configuration has no `config_groups`")
    ignored = parts.config.get("ignore")
    if any(_names(base, one) for one in (ignored if isinstance(ignored, list) else ())):
        raise contradiction(f"`ignore` names `{base[:60]}`, whose weight is stored quantized")
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
    return pattern == base if pattern == str(target) else matches(pattern, base)


def _groups_of(config: Config) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    tables = groups.values() if isinstance(groups, Mapping) else ()
    return [table for table in tables if isinstance(table, Mapping)]


def planned_bits(config: Config) -> int | None:
    weights = [table.get("weights") for table in _groups_of(config)]
    counts = (bits_in(table if isinstance(table, Mapping) else config) for table in weights)
    return next((bits for bits in counts if bits is not None), None)


def planned_rounding(config: Config) -> Rounding | str | None:
    kinds = (rounding_of(table) for table in _groups_of(config))
    return next((kind for kind in kinds if kind is not None), None)


def rounding_of(table: Mapping[str, Any]) -> Rounding | str | None:
    """Return the rounding of a group, or the name of one that is not run."""
    arguments = table.get("input_activations")
    if not isinstance(arguments, Mapping):
        return None
    kind, bits = str(arguments.get("type") or "int"), arguments.get("num_bits")
    strategy, dynamic = str(arguments.get("strategy") or ""), arguments.get("dynamic")
    kinds: dict[tuple[object, ...], Kind] = {
        ("float", 8, "token", True): "fp8",
        ("float", 8, "group", True): "fp8 by 128",
        ("float", 8, "tensor", False): "fp8 fixed",
        ("int", 8, "token", True): "int8",
        ("int", 8, "tensor", False): "int8 fixed",
        ("float", 4, "tensor_group", "local"): "nvfp4",
        ("float", 4, "group", True): "mxfp4",
    }
    sizes = {"fp8 by 128": 128, "nvfp4": 16, "mxfp4": 32}
    key = (kind, bits, strategy, "local" if dynamic == "local" else bool(dynamic))
    rounding = kinds.get(key)
    usual = arguments.get("symmetric", True) and arguments.get("actorder") is None
    if (
        rounding is None
        or not usual
        or arguments.get("group_size") not in (None, sizes.get(rounding))
    ):
        return f"{bits}-bit {kind}, {'dynamic' if dynamic else 'fixed'} by {strategy or 'tensor'}"
    return Rounding(rounding)
