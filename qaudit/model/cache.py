"""A cache that rounds what attention hands to it, for as long as a block belongs to one stream.

Attention of every family gives new keys and values to a cache, if it is called with one, and reads
what the cache returns. The one here returns them rounded and keeps nothing: all tokens of a window
are there at once.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from qaudit.errors import ModelError

NAMES = ("past_key_values", "layer_past")

RoundHeads = Callable[[Tensor], Tensor]


class RoundingCache:
    """Gives a block's attention a cache that rounds; ends with `remove`."""

    def __init__(self, index: int, block: nn.Module, change: RoundHeads) -> None:
        """Refuse a block that takes no cache."""
        self._index, self._change = index, change
        self._call = threading.local()  # batches that wait inside a block have threads of their own
        self.width: int | None = None  # of a head, once there was one
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        self._place = next(((names.index(name), name) for name in NAMES if name in names), None)
        if self._place is None:
            raise self._refused("takes no cache")
        if any(hasattr(module, "kv_lora_rank") for module in block.modules()):
            raise self._refused("caches a latent, of which keys and values are made")
        self._handles = (
            block.register_forward_pre_hook(self._give, with_kwargs=True),
            block.register_forward_hook(self._check),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _give(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self._place is not None
        position, name = self._place
        cache = self._call.cache = _Rounding(self._round)
        stores = [value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping)]
        self._call.shares = any(stores)  # what earlier blocks stored was rounded there
        if position < len(args):
            return (*args[:position], cache, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: cache}

    def _check(self, *_: object) -> None:
        times = self._call.cache.updates
        if times != 1 and not (times == 0 and self._call.shares):
            raise self._refused(f"hands keys and values to a cache {times} times")

    def _round(self, states: Tensor) -> Tensor:
        if states.dim() != 4:
            raise self._refused(f"caches {states.dim()} dimensions, not heads of tokens")
        self.width = states.shape[-1]
        return self._change(states)

    def _refused(self, why: str) -> ModelError:
        return ModelError(
            f"`kv` cannot round the keys and values of block {self._index}: its attention {why}",
            hint="leave `kv` out for this model",
        )


class _Rounding(DynamicCache):
    """Hands rounded keys and values back, and keeps none."""

    def __init__(self, change: RoundHeads) -> None:
        super().__init__()
        self._change, self.updates = change, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.updates += 1
        return self._change(key_states), self._change(value_states)
