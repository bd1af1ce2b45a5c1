"""What blocks leave for later blocks beside hidden states, such as keys and values they share.

It belongs to the hidden states of one batch in one stream, and goes where they go: a table that
holds nothing alive names the tensors beside each tensor of hidden states. A block reads copies and
leaves new tensors, so that running it again gives the same. What the model itself makes of the
tokens for a block (Gemma's inputs per layer) is *given*: it is the same for all streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qaudit.errors import ModelError

Beside = Mapping[str, Tensor]
"""Tensors by name. Those of a store are `STORE:KEY/PLACE`, all others have no colon."""

GIVEN = "given"
"""How the name begins of what a model makes of its tokens."""

_NONE = (0,)
"""The shape of the tensor that stands for None."""

_table: Any = WeakIdKeyDictionary()


def beside(hidden_BTD: Tensor) -> Beside:
    return dict(_table.get(hidden_BTD, {}))


def leave(hidden_BTD: Tensor, tensors: Beside) -> Tensor:
    """Return hidden states with these tensors beside them, and no others."""
    if tensors or hidden_BTD in _table:
        hidden_BTD = hidden_BTD.view_as(hidden_BTD)  # the same values elsewhere have others
    if tensors:
        _table[hidden_BTD] = dict(tensors)
    return hidden_BTD


def packed(value: object, what: str) -> Tensor:
    """Return the tensor that stands for a value which a block returned."""
    if value is None:
        return torch.zeros(_NONE, dtype=torch.bool)
    if isinstance(value, Tensor):
        return value
    raise ModelError(
        f"{what} is a `{type(value).__name__}`, which cannot be kept between blocks",
        hint="only tensors are kept for later blocks",
    )


def unpacked(tensor: Tensor) -> Tensor | None:
    """Return a copy: a block may write into what it is given."""
    return None if is_none(tensor) else tensor.clone()


def is_none(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool and tensor.shape == _NONE


def fill(store: MutableMapping[Any, Any], name: str, tensors: Beside) -> None:
    """Write what blocks left in a store of this name."""
    parts: dict[Any, dict[str, Any]] = {}
    for path, tensor in tensors.items():
        owner, _, rest = path.partition(":")
        if owner == name and rest:
            key, _, place = rest.rpartition("/")
            parts.setdefault(_key(key), {})[place] = unpacked(tensor)
    for key, values in parts.items():
        store[key] = values.get("") if "" in values else tuple(values[p] for p in sorted(values))


def left_in(store: Mapping[Any, Any], name: str) -> dict[str, Tensor]:
    """Return what a store of this name holds."""
    tensors = {}
    for key, value in store.items():
        path = f"{name}:{_path(key, name)}/"
        if isinstance(value, tuple | list):
            for place, part in enumerate(value):
                tensors[f"{path}{place:03}"] = packed(part, f"`{key}` of what blocks share")
        else:
            tensors[path] = packed(value, f"`{key}` of what blocks share")
    return tensors


def _path(key: object, name: str) -> str:
    if isinstance(key, str) and not key.startswith("#"):
        return key
    if isinstance(key, int):
        return f"#{key}"
    raise ModelError(
        f"blocks share a value under a `{type(key).__name__}`",
        hint="only tensors are kept for later blocks",
    )


def _key(path: str) -> str | int:
    return int(path[1:]) if path.startswith("#") else path


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dicts with every leaf changed; an empty dict is a leaf."""
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, change) for part in value)
    if type(value) is dict and value:
        return {key: mapped(part, change) for key, part in value.items()}
    return change(value)


@dataclass(frozen=True)
class _TensorColumns:
    """A tensor as columns."""

    name: str
    place: int  # of tokens among its dimensions, of which the first are windows
    sizes: tuple[int, ...]  # of the other dimensions
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class WideRows:
    """Hidden states with what is beside them as further columns, which are cut as windows are.

    Whole numbers are columns of the same bits.
    """

    hidden_BTD: Tensor
    parts: tuple[_TensorColumns, ...]
    nothing: Beside  # what stands for None

    @classmethod
    def of(cls, hidden_BTD: Tensor) -> WideRows:
        tensors = beside(hidden_BTD)
        nothing = {name: tensor for name, tensor in tensors.items() if is_none(tensor)}
        parts = [
            _part(name, tensors[name], hidden_BTD) for name in sorted(tensors.keys() - nothing)
        ]
        return cls(hidden_BTD[:0], tuple(parts), nothing)

    def join(self, hidden_BTD: Tensor) -> Tensor:
        if not self.parts:
            return hidden_BTD
        tensors, (windows, tokens) = beside(hidden_BTD), hidden_BTD.shape[:2]
        columns = [
            tensors[part.name]
            .movedim(part.place, 1)
            .reshape(windows, tokens, -1)
            .view(hidden_BTD.dtype)
            for part in self.parts
        ]
        return torch.cat([hidden_BTD, *columns], -1)

    def split(self, x_BTC: Tensor) -> Tensor:
        """Return hidden states with what is beside them."""
        tensors, first = dict(self.nothing), self.hidden_BTD.shape[-1]
        for part in self.parts:
            behind = first + prod(part.sizes) * part.dtype.itemsize // x_BTC.dtype.itemsize
            numbers = x_BTC[..., first:behind].contiguous().view(part.dtype)
            numbers = numbers.reshape(*x_BTC.shape[:2], *part.sizes)
            tensors[part.name], first = numbers.movedim(1, part.place), behind
        return leave(x_BTC[..., : self.hidden_BTD.shape[-1]], tensors)


def _part(name: str, tensor: Tensor, hidden_BTD: Tensor) -> _TensorColumns:
    """Refuse a tensor of which it is not certain what belongs to a token."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    places = [k for k, size in enumerate(shape) if k and size == hidden_BTD.shape[1]]
    fits = dtype == hidden_BTD.dtype or dtype in (torch.int32, torch.int64)
    if len(places) != 1 or shape[0] != hidden_BTD.shape[0] or not fits:
        raise ModelError(
            "schemes that learn on the output of a block cut windows, and what blocks of this "
            f"model leave for later ones cannot be cut: {list(shape)} numbers of `{dtype}` for "
            f"{list(hidden_BTD.shape[:2])} tokens",
            hint="leave schemes out that learn on whole blocks, or set another `--set context=N`",
        )
    return _TensorColumns(name, places[0], shape[1 : places[0]] + shape[places[0] + 1 :], dtype)
