"""Stand-ins for the blocks, so that a model's own front and head run without them.

Every family prepares its blocks' arguments in its own way: rotary embeddings for each layer
type, masks for each attention type, positions. Rather than repeat that per family, the model
runs once with a stub in place of each block; the stub writes down what its block would have
been given, and hands its input on. Later, the last stub hands on hidden states from elsewhere,
and the model's own norm, head, soft cap and scaling make logits of them.

What cannot be kept between two blocks is refused, and so is a model that does something to the
hidden states between them.

What links the blocks of a model beside hidden states, found by recording it with stubs.

Three kinds are kept beside hidden states (`beside.py`): what a block returns and a later one is
given, a mapping that is empty before the first block, and tensors that the model makes of its
tokens for a block. Refused are objects that are neither plain nor such a mapping, and what the
model makes of hidden states between two blocks: that would have to be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.errors import ModelError
from qaudit.model.beside import (
    GIVEN,
    Beside,
    fill,
    leave,
    left_in,
    mapped,
    packed,
    unpacked,
)

Shape = tuple[int, int]
HINT = "this model's blocks cannot be run one at a time"


@dataclass(frozen=True)
class Carried:
    """Stands for a tensor that is beside hidden states."""

    name: str


def returned(block: int, place: int) -> Carried:
    """Return what stands for a value of the tuple that a block returns."""
    return Carried(f"returned{block}.{place}")


@dataclass(frozen=True)
class Store:
    """Stands for a mapping into which blocks write and from which later ones read."""

    name: str
    kind: type[MutableMapping[Any, Any]]


@dataclass(frozen=True)
class Form:
    """How hidden states of more than three dimensions are laid out: several for each token."""

    place: int  # of the windows among the dimensions; tokens are behind them
    sizes: tuple[int, ...]  # of the dimensions that are neither

    def flat(self, hidden: Tensor) -> Tensor:
        """Return (B, T, D) of what a block returns."""
        return hidden.movedim((self.place, self.place + 1), (0, 1)).flatten(2)

    def full(self, hidden_BTD: Tensor) -> Tensor:
        """Return what a block is given."""
        hidden: Tensor = hidden_BTD.unflatten(2, self.sizes)
        return hidden.movedim((0, 1), (self.place, self.place + 1)).contiguous()


def form_of(hidden: Tensor, shape: Shape) -> Form | None:
    """Return the form of hidden states of a batch; None for (B, T, D)."""
    if hidden.dim() == 3:
        return None
    sizes = tuple(hidden.shape)
    for place in range(hidden.dim() - 1):
        if sizes[place : place + 2] == shape:
            return Form(place, sizes[:place] + sizes[place + 2 :])
    raise ModelError(
        f"hidden states of {list(shape)} tokens are {list(sizes)}, not some for each token",
        hint=HINT,
    )


@dataclass(frozen=True, eq=False)
class Arguments:
    """What a block is called with, beside the hidden states."""

    before: tuple[Any, ...] = ()
    after: Mapping[str, Any] = field(default_factory=dict)
    keyword: str | None = None  # the name under which hidden states are passed, if any
    form: Form | None = None
    index: int = 0  # of the block
    later: frozenset[str] = frozenset()  # stores and tensors that blocks behind it read
    beside: Beside = field(default_factory=dict)  # what is beside the hidden states

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Arguments]:
        """Return the hidden states of a call, which are first, and its other arguments."""
        if args:
            return args[0], cls(args[1:], kwargs)
        keyword = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        rest = {name: value for name, value in kwargs.items() if name != keyword}
        return kwargs[keyword], cls((), rest, keyword)

    def call(self, block: nn.Module, hidden_BTD: Tensor) -> Tensor:
        """Return the block's hidden states, with what later blocks read beside them."""
        stores: dict[str, MutableMapping[Any, Any]] = {}

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, Carried):
                return unpacked(self.beside[leaf.name])
            if isinstance(leaf, Store):
                if leaf.name not in stores:
                    stores[leaf.name] = leaf.kind()
                    fill(stores[leaf.name], leaf.name, self.beside)
                return stores[leaf.name]
            return leaf

        before, after = self.changed(filled)
        entering = hidden_BTD if self.form is None else self.form.full(hidden_BTD)
        if self.keyword is None:
            out = block(entering, *before, **after)
        else:
            out = block(*before, **{self.keyword: entering}, **after)
        hidden, *others = out if isinstance(out, tuple | list) else (out,)
        assert isinstance(hidden, Tensor)
        tensors = self._left(others, stores) if self.later else {}
        return leave(hidden if self.form is None else self.form.flat(hidden), tensors)

    @property
    def has_stored(self) -> bool:
        """Return whether earlier blocks left anything in a mapping that the block is given."""
        stores = {leaf.name for leaf in _leaves(self) if isinstance(leaf, Store)}
        return any(":" in name and name.partition(":")[0] in stores for name in self.beside)

    def to_float32(self) -> Arguments:
        """Return the arguments with their floating tensors in fp32."""
        before, after = self.changed(_float32)
        tensors = {name: _float32(tensor) for name, tensor in self.beside.items()}
        return replace(self, before=before, after=after, beside=tensors)

    def changed(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments with every leaf changed."""
        before = mapped(self.before, change)
        after = {name: mapped(value, change) for name, value in self.after.items()}
        return before, after

    def _left(
        self, others: Sequence[Any], stores: Mapping[str, MutableMapping[Any, Any]]
    ) -> dict[str, Tensor]:
        """Return what later blocks read: what was there before, and what this block adds."""
        tensors = {
            name: tensor
            for name, tensor in self.beside.items()
            if name in self.later or name.partition(":")[0] in self.later - stores.keys()
        }
        for name in self.later & stores.keys():
            tensors |= left_in(stores[name], name)
        for place, value in enumerate(others, 1):
            name = returned(self.index, place).name
            if name in self.later:
                tensors[name] = packed(value, f"what block {self.index} returns for later blocks")
        return tensors


@dataclass(eq=False)
class Tape:
    """What the stubs write, and what the last of them plays back."""

    count: int
    arguments: dict[int, Arguments] = field(default_factory=dict)
    first_BTD: Tensor | None = None
    played_BTD: Tensor | None = None  # hidden states for the head; None while recording
    returns: int = 0  # how many values this family's blocks return as a tuple; 0: one, bare
    moves: bool = False  # whether blocks return other hidden states than they were given
    _linked: Tensor | None = None

    def pass_on(self, index: int, hidden_BTD: Tensor, arguments: Arguments) -> Tensor:
        if self.played_BTD is not None:
            return self.played_BTD if index == self.count - 1 else hidden_BTD
        if index == 0:
            self.first_BTD = hidden_BTD
        elif not _is_all_of(hidden_BTD, self._linked):
            raise ModelError(f"the model changes the hidden states before block {index}", hint=HINT)
        self._linked = hidden_BTD + 1 if self.moves else hidden_BTD
        self.arguments[index] = arguments
        return self._linked

    def rewind(self) -> tuple[Tensor, dict[int, Arguments]]:
        """Return the recorded calls, and forget them."""
        if self.first_BTD is None or len(self.arguments) != self.count:
            raise ModelError("the model does not run all of its blocks", hint=HINT)
        recorded = self.first_BTD, dict(self.arguments)
        self.first_BTD, self._linked = None, None
        self.arguments.clear()
        return recorded


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
        out = self._tape.pass_on(self._index, *Arguments.of(args, kwargs))
        count = self._tape.returns
        return (out, *(returned(self._index, place) for place in range(1, count))) if count else out


def _is_all_of(tensor: Tensor, whole: Tensor | None) -> bool:
    """Return whether a tensor is another one, or a view of all of it."""
    return whole is not None and (
        (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        == (whole.data_ptr(), whole.shape, whole.stride(), whole.dtype)
    )


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))
_Link = Carried | Store

Recorded = Mapping[int, Arguments]
"""What each block was called with."""


@dataclass(frozen=True, eq=False)
class Links:
    """What each block reads and leaves beside hidden states."""

    reads: Mapping[int, Mapping[int, _Link]] = field(default_factory=dict)  # by block and leaf

    @classmethod
    def of(cls, first: Recorded, other: Recorded, moved: Callable[[], Recorded]) -> Links:
        """Compare recordings of some tokens and others; what differs is not to be of hidden states.

        `moved` records the first tokens once more, with other hidden states behind each block.
        """
        reads: dict[int, dict[int, _Link]] = {}
        stores: dict[int, str] = {}  # by identity, which all blocks are given
        given: dict[int, str] = {}
        for index in first:
            these, others = _leaves(first[index]), _leaves(other[index])
            if len(these) != len(others):
                raise _of_tokens(index)
            reads[index] = {}
            for place, leaf in enumerate(these):
                if isinstance(leaf, Carried):
                    reads[index][place] = leaf
                elif isinstance(leaf, MutableMapping) and not leaf:  # blocks may write into it
                    name = stores.setdefault(id(leaf), f"store{len(stores)}")
                    reads[index][place] = Store(name, type(leaf))
                elif not isinstance(leaf, _PLAIN):
                    raise ModelError(
                        f"block {index} is given a `{type(leaf).__name__}`, "
                        "which may carry state between blocks",
                        hint=HINT,
                    )
                elif not _same(leaf, others[place]):
                    if not isinstance(leaf, Tensor):
                        raise _of_tokens(index)
                    name = given.setdefault(id(leaf), f"{GIVEN}{index}.{place}")
                    reads[index][place] = Carried(name)
        after = moved() if given else {}
        for index in after:
            for leaf, other_leaf in zip(_leaves(first[index]), _leaves(after[index]), strict=False):
                if isinstance(leaf, Tensor) and not _same(leaf, other_leaf):
                    raise ModelError(
                        f"what block {index} is given is computed from hidden states between "
                        "blocks",
                        hint=HINT,
                    )
        return cls(reads)

    def settle(self, recorded: Recorded, form: Form | None) -> tuple[dict[int, Arguments], Beside]:
        """Return arguments without what differs between batches, and what is given of these."""
        tensors: dict[str, Tensor] = {}
        settled = {}
        for index, arguments in recorded.items():
            links = self.reads.get(index, {})
            links_in_order = (links.get(place) for place in count())

            def link_of(leaf: Any, links: Iterator[_Link | None] = links_in_order) -> Any:
                link = next(links)
                if isinstance(link, Carried) and link.name.startswith(GIVEN):
                    tensors[link.name] = leaf.contiguous()
                return leaf if link is None else link

            before, after = arguments.changed(link_of)
            settled[index] = replace(
                arguments,
                before=before,
                after=after,
                form=form,
                index=index,
                later=self.later(index),
            )
        return settled, tensors

    def later(self, index: int) -> frozenset[str]:
        """Return the names of all that blocks behind one read."""
        return frozenset(
            link.name
            for block, links in self.reads.items()
            if block > index
            for link in links.values()
        )

    def given(self, index: int) -> frozenset[str]:
        """Return the names of what the model gives a block of its tokens."""
        names = (link.name for link in self.reads.get(index, {}).values())
        return frozenset(name for name in names if name.startswith(GIVEN))

    def passed(self, index: int) -> frozenset[str]:
        """Return the names of what was given to blocks up to one, and to none behind it."""
        names = (name for block in self.reads if block <= index for name in self.given(block))
        return frozenset(names) - self.later(index)


def is_same_call(first: Arguments, other: Arguments) -> bool:
    """Return whether two calls have the same arguments beside hidden states."""
    these, those = _leaves(first), _leaves(other)
    return len(these) == len(those) and all(map(_same, these, those))


def _of_tokens(index: int) -> ModelError:
    return ModelError(f"what block {index} is given depends on the tokens", hint=HINT)


def _leaves(arguments: Arguments) -> list[Any]:
    result: list[Any] = []
    arguments.changed(result.append)
    return result


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(a, b)
    if isinstance(a, MutableMapping) or isinstance(b, MutableMapping):
        return a is b or not (a or b)  # stores differ in what blocks wrote into them
    return type(a) is type(b) and a == b
