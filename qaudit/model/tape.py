"""Stand-ins for the blocks, so that a model's own front and head run without them.

Every family prepares its blocks' arguments in its own way: rotary embeddings for each layer
type, masks for each attention type, positions. Rather than repeat that per family, the model
runs once with a stub in place of each block; the stub writes down what its block would have
been given, and hands its input on. Later, the last stub hands on hidden states from elsewhere,
and the model's own norm, head, soft cap and scaling make logits of them.

This is sound only if blocks are linked by hidden states alone. Three signs of the contrary are
refused: something is done to the hidden states between blocks, a block is given an object that
could carry state from one block to another, and a block's arguments depend on the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.errors import ModelError

Shape = tuple[int, int]
_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))
_HINT = "this model's blocks cannot be run one at a time"


class LinkedBlocksError(ModelError):
    """Blocks are linked by more than the hidden states between them."""


@dataclass(frozen=True, eq=False)
class Arguments:
    """What a block is called with, beside the hidden states."""

    before: tuple[Any, ...] = ()
    after: Mapping[str, Any] = field(default_factory=dict)
    keyword: str | None = None  # the name under which hidden states are passed, if any

    def call(self, block: nn.Module, hidden_BTD: Tensor) -> Tensor:
        # Where no layer shares its keys, each block has a store of its own, which none reads.
        after = {
            name: type(value)() if is_store(value) else value for name, value in self.after.items()
        }
        if self.keyword is None:
            out = block(hidden_BTD, *self.before, **after)
        else:
            out = block(*self.before, **{self.keyword: hidden_BTD}, **after)
        hidden = out[0] if isinstance(out, tuple | list) else out
        assert isinstance(hidden, Tensor)
        return hidden

    def to_float32(self) -> Arguments:
        """Return the arguments with their floating tensors in fp32."""
        return Arguments(
            _float32(self.before),
            {name: _float32(value) for name, value in self.after.items()},
            self.keyword,
        )


@dataclass(eq=False)
class Tape:
    """What the stubs write, and what the last of them plays back."""

    count: int
    arguments: dict[int, Arguments] = field(default_factory=dict)
    first_BTD: Tensor | None = None
    played_BTD: Tensor | None = None  # hidden states for the head; None while recording
    returns: int = 0  # how many values this family's blocks return as a tuple; 0: one, bare
    _linked: Tensor | None = None

    def pass_on(self, index: int, hidden_BTD: Tensor, arguments: Arguments) -> Tensor:
        if self.played_BTD is not None:
            return self.played_BTD if index == self.count - 1 else hidden_BTD
        if index == 0:
            self.first_BTD = hidden_BTD
        elif hidden_BTD is not self._linked:
            must_be_plain(self.arguments)  # if they carry state, that is why
            raise LinkedBlocksError(
                f"the model changes the hidden states before block {index}", hint=_HINT
            )
        self._linked = hidden_BTD
        self.arguments[index] = arguments
        return hidden_BTD

    def rewind(self) -> tuple[Tensor, dict[int, Arguments]]:
        """Return the recorded calls, and forget them."""
        if self.first_BTD is None or len(self.arguments) != self.count:
            raise LinkedBlocksError("the model does not run all of its blocks", hint=_HINT)
        recorded = self.first_BTD, dict(self.arguments)
        self.first_BTD, self._linked = None, None
        self.arguments.clear()
        return recorded


class Beside:
    """What a block returns beside hidden states; a link between blocks where one is given it."""


def hidden_keyword(called: Mapping[str, Any]) -> str:
    """Return the name under which a block that is called by keywords gets hidden states."""
    return "hidden_states" if "hidden_states" in called else next(iter(called))


class Stub(nn.Module):
    """Takes the place of one block, with the attributes of that block."""

    def __init__(self, index: int, block: nn.Module, tape: Tape) -> None:
        super().__init__()
        self._index, self._tape = index, tape
        self._block = (block,)  # in a tuple, so that its parameters are not ours

    def __getattr__(self, name: str) -> Any:
        # models read the attention type of a layer
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Write down the arguments and hand the hidden states on."""
        if args:
            hidden_BTD, arguments = args[0], Arguments(args[1:], kwargs)
        else:
            keyword = hidden_keyword(kwargs)
            hidden_BTD = kwargs[keyword]
            rest = {name: value for name, value in kwargs.items() if name != keyword}
            arguments = Arguments((), rest, keyword)
        out = self._tape.pass_on(self._index, hidden_BTD, arguments)
        count = self._tape.returns
        return (out, *(Beside() for _ in range(count - 1))) if count else out


def is_store(value: object) -> bool:
    """Return whether a value is an empty mapping, into which blocks may write."""
    return isinstance(value, MutableMapping) and not value


def must_be_plain(arguments: Mapping[int, Arguments], *, shares: bool = True) -> None:
    """Refuse arguments that could carry state from one block to another.

    `shares`: whether layers read keys that others stored.
    """
    for index, argument in arguments.items():
        for value in _leaves((argument.before, *argument.after.values())):
            if isinstance(value, Beside):
                raise LinkedBlocksError(
                    f"block {index} is given what a block before it returned beside hidden states",
                    hint=_HINT,
                )
            if not isinstance(value, _PLAIN) and (shares or not is_store(value)):
                raise LinkedBlocksError(
                    f"block {index} is given a `{type(value).__name__}`, "
                    "which may carry state between blocks",
                    hint=_HINT,
                )


def must_agree(a: Mapping[int, Arguments], b: Mapping[int, Arguments]) -> None:
    """Refuse arguments that differ between two batches of one shape."""
    for index in a:
        leaf = _leaves((a[index].before, *a[index].after.values()))
        other = _leaves((b[index].before, *b[index].after.values()))
        if len(leaf) != len(other) or not all(map(_same, leaf, other)):
            raise LinkedBlocksError(
                f"what block {index} is given depends on the tokens", hint=_HINT
            )


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and a == b


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _float32(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_float32(part) for part in value)
    return value
