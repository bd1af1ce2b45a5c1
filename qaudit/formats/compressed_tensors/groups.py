"""The groups of linears in a configuration of compressed-tensors, and which linear is in which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qaudit.formats.activations import Rounding, of_group
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
    kinds = (of_group(table) for table in _groups_of(config))
    return next((kind for kind in kinds if kind is not None), None)
