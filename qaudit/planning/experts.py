"""What a plan says of mixtures of experts, by headers and configurations. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from qaudit.core.sizes import size
from qaudit.model.gates import left_as_gates
from qaudit.planning.sizes import Sizes
from qaudit.types import Recipe

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_OF_EXPERTS = re.compile(r"^(.*?\bexperts)\b")


def with_experts(sizes: Sizes, config: Mapping[str, Any]) -> Sizes:
    """Return the sizes with the experts of a layer, and how many of them read a token."""
    config = {**config, **(config.get("text_config") or {})}
    count, each = (_first(config, names) for names in (_EXPERTS, _PER_TOKEN))
    return replace(sizes, experts=count, per_token=min(each, count)) if count and each else sizes


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def expert_notes(sizes: Sizes, recipe: Recipe) -> Iterator[str]:
    """Yield what experts cost, and which routers and gates are left as they are."""
    if not sizes.experts:
        return
    one, every = 4 * sizes.widest**2, 4 * sizes.widest**2 * sizes.experts
    yield (
        f"{sizes.per_token} of {sizes.experts} experts in a layer read a token; statistics of one "
        f"expert are in memory at a time, up to {size(one)}, where those of a layer take "
        f"{size(every)}"
    )
    names = list(dict.fromkeys(name for _, name in sizes.matrices))
    owners = {match[1] for name in names if (match := _OF_EXPERTS.search(name))}
    gates = list(left_as_gates(names, owners or {"mlp.experts"}))
    if gates and not recipe.quantize_routers:
        shown = ", ".join(f"`{name}`" for name in gates[:4]) + ", ..." * (len(gates) > 4)
        yield f"routers and small gates are left as they are: {shown} (`--quantize-routers`)"
