"""What a plan says of tensors that wait beside hidden states, by a configuration. No torch.

The engine finds them by running the model (`model/links.py`); a plan knows the types that a release
has: keys that later blocks read, indices that they read, several hidden states for a token, and
inputs that a model makes of its tokens for each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from qaudit.core.sizes import size
from qaudit.planning.sizes import Sizes

_INDEX_NBYTES, _NUMBER_NBYTES = 8, 2
_HANDED_ON = ("indexer_types", "index_topk_freq", "index_topk_pattern")
_COPIES = ("hc_mult", "altup_num_inputs")  # hidden states of a token


def with_beside(sizes: Sizes, config: Mapping[str, Any]) -> Sizes:
    """Return the sizes with what waits beside the hidden states of a token."""
    config = {**config, **(config.get("text_config") or {})}
    copies = max(first_whole(config, *_COPIES), 1)
    beside = (copies - 1) * sizes.hidden + _shared_keys(config) + _indices(config)
    given = first_whole(config, "hidden_size_per_layer_input") * sizes.blocks
    return replace(sizes, beside=beside + first_whole(config, "router_hidden_size"), given=given)


def beside_notes(sizes: Sizes, itemsize: int, context: int) -> Iterator[str]:
    """Yield what a document takes beside its hidden states."""
    if sizes.beside:
        nbytes = sizes.beside * itemsize * context
        yield (
            f"beside {sizes.hidden:,} numbers of a token, blocks leave {sizes.beside:,} for later "
            f"blocks: {size(nbytes)} for a document of {context:,} tokens, in each stream"
        )
    if sizes.given:
        nbytes = sizes.given * itemsize * context
        yield (
            f"the model makes {sizes.given:,} numbers of a token for its blocks, which all streams "
            f"share: {size(nbytes)} for a document of {context:,} tokens"
        )


def _shared_keys(config: Mapping[str, Any]) -> int:
    """Return the keys and values of a token that later blocks read, one of each kind of layer."""
    sources = config.get("kv_source_layers")
    if isinstance(sources, list) and sources != list(range(len(sources))):  # latents, of two kinds
        return 2 * (first_whole(config, "kv_lora_rank") + first_whole(config, "qk_rope_head_dim"))
    count, kinds = first_whole(config, "num_kv_shared_layers"), config.get("layer_types")
    if not count:
        return 0
    last = kinds[-count:] if isinstance(kinds, list) else ["full_attention"]
    total = 0
    for kind in {str(kind) for kind in last}:
        is_full = kind == "full_attention"
        heads = ("num_global_key_value_heads",) * is_full + ("num_key_value_heads",)
        widths = ("global_head_dim",) * is_full + ("head_dim",)
        total += 2 * first_whole(config, *heads) * first_whole(config, *widths)
    return total


def _indices(config: Mapping[str, Any]) -> int:
    """Return what the indices take that a sparse indexer leaves for later blocks, as numbers."""
    if not any(config.get(name) for name in _HANDED_ON):
        return 0
    return first_whole(config, "index_topk") * _INDEX_NBYTES // _NUMBER_NBYTES


def first_whole(config: Mapping[str, Any], *names: str) -> int:
    """Return the first number above zero that a configuration has under some names, or zero."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
