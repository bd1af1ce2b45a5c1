"""The items of tasks: batches in which what options share is fed once, and their way in a stream.

    tokens     c c c c c  a a a  b b  d d d d    (a context, then each option but its last token)
    positions  0 1 2 3 4  5 6 7  5 6  5 6 7 8
    ends      14 ....     8 8 8  10.. 14 ....        (of what is below each token)

Sequences are sorted, so that what begins alike stands together, be it the options of an item or
the items under the same examples. A window is the tree of their tokens in preorder: a token sees
those whose part of the window it is in, which are the ones before it in its own sequence. Where a
model takes no such mask, sequences share a window only if one begins the other, and the windows
are ordinary. Which sequences stand together depends on the corpus alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qaudit.engine.batches import TOKENS_PER_BATCH
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.routing import BatchPlace, RoutingWatch
from qaudit.items.tokens import PADDED
from qaudit.model.blocks import Block, BlockModel
from qaudit.model.proven import NO_LIMIT
from qaudit.model.tape import Arguments
from qaudit.planning.footprint import MASKS_NBYTES, TREE_TOKENS
from qaudit.types import Window

if TYPE_CHECKING:
    from qaudit.engine.tally import Tally


_WORTH = 3072
"""A shared token saves about this many multiplications for each of the hidden size that a pair of
tokens takes in attention: six times a hidden size of 512."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ItemBatch:
    """Windows side by side, and what is read off them: Q log-likelihoods of tokens."""

    tokens_BT: Tensor
    positions_BT: Tensor
    ends_BT: Tensor  # a row before this one, and not before the token, is below the token
    rows_Q: Tensor  # of B * T: the row whose next token is scored
    targets_Q: Tensor
    options_Q: Ints  # the option that the token belongs to
    branched: bool

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return (B, 1, T, T): 0 where a row may look, else the lowest number.

        Additive, never boolean: eager attention adds whatever it is given, and True is 1 there.
        """
        ends_B1T = self.ends_BT.to(device)[:, None, :]
        rows_T = torch.arange(ends_B1T.shape[-1], device=device)
        seen_BTT = (rows_T[None, :] <= rows_T[:, None]) & (rows_T[:, None] < ends_B1T)
        lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
        return torch.where(seen_BTT, torch.zeros((), dtype=dtype, device=device), lowest)[:, None]


@dataclass(eq=False)
class _Tree:
    """A window while sequences are added to it, in sorted order."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)  # rows of the sequence added last
    last: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # its tokens
    reads: list[tuple[int, int, int]] = field(default_factory=list)  # row, target, option
    branched: bool = False

    def shared(self, tokens: Ints) -> int:
        """Return how many tokens a sequence has in common with the one added last."""
        most = min(len(self.last), len(tokens))
        different = np.flatnonzero(self.last[:most] != tokens[:most])
        return int(different[0]) if len(different) else most

    def takes(self, tokens: Ints, shared: int, *, branches: bool) -> bool:
        """Return whether a sequence should go in here."""
        new, size = len(tokens) - shared, len(self.tokens)
        if new == 0 or shared == size:
            return shared > 0
        return branches and size + new <= TREE_TOKENS and shared * _WORTH >= new * size

    def add(self, option: int, window: Window, shared: int) -> None:
        size, tokens = len(self.tokens), window.tokens[:-1]
        self.branched |= shared < len(self.path) and len(tokens) > shared
        self.close(shared)
        new = tokens[shared:].tolist()
        self.path += range(size, size + len(new))
        self.tokens += new
        self.positions += range(shared, shared + len(new))
        self.ends += [-1] * len(new)
        self.last = tokens.astype(np.int64)
        for place in range(window.scored_from, len(window.tokens)):
            self.reads.append((self.path[place - 1], int(window.tokens[place]), option))

    def close(self, depth: int) -> None:
        """Note where the part below each row of the path ends, from a depth on."""
        for row in self.path[depth:]:
            self.ends[row] = len(self.tokens)
        del self.path[depth:]


def make_item_batches(
    parts: Sequence[Sequence[Window]], *, branches: bool, pad_until: int = NO_LIMIT
) -> tuple[ItemBatch, ...]:
    """Group the options of items into batches; each window is one option.

    Parts share no batch, so that the losses of one do not depend on what is measured beside it.
    Beyond `pad_until` tokens a window is that of one length: nothing begins it, or pads it.
    """
    batches: list[ItemBatch] = []
    first = 0
    for windows in parts:
        trees = _trees(windows, first, branches=branches, pad_until=pad_until)
        batches += _batches(trees, pad_until)
        first += len(windows)
    return tuple(batches)


def _batches(trees: Sequence[_Tree], pad_until: int) -> Iterator[ItemBatch]:
    order = sorted(range(len(trees)), key=lambda k: (trees[k].branched, -len(trees[k].tokens), k))
    position = 0
    while position < len(order):
        first = trees[order[position]]
        length = len(first.tokens)
        width = max(length, min(-(-length // PADDED) * PADDED, pad_until))
        rows = max(1, TOKENS_PER_BATCH // width)
        some = [trees[k] for k in order[position : position + rows]]
        some = [tree for tree in some if tree.branched == first.branched]
        if length > pad_until:
            some = [tree for tree in some if len(tree.tokens) == length]
        yield _batch(some, width)
        position += len(some)


def _trees(
    windows: Sequence[Window], first: int = 0, *, branches: bool, pad_until: int = NO_LIMIT
) -> list[_Tree]:
    fed = [window.tokens[:-1].astype(np.int64) for window in windows]
    order = sorted(range(len(windows)), key=lambda k: (fed[k].astype(">i8").tobytes(), k))
    trees: list[_Tree] = []
    for k in order:
        shared = trees[-1].shared(fed[k]) if trees else 0
        new = len(fed[k]) - shared
        alone = new > 0 and len(fed[k]) > pad_until
        if not trees or alone or not trees[-1].takes(fed[k], shared, branches=branches):
            if trees:
                trees[-1].close(0)
            trees.append(_Tree())
            shared = 0
        trees[-1].add(first + k, windows[k], shared)
    if trees:
        trees[-1].close(0)
    return trees


def _batch(trees: Sequence[_Tree], width: int) -> ItemBatch:
    tokens_BT = torch.zeros(len(trees), width, dtype=torch.long)
    positions_BT = torch.zeros(len(trees), width, dtype=torch.long)
    ends_BT = torch.arange(1, width + 1).repeat(len(trees), 1)  # padding sees itself alone
    reads: list[tuple[int, int, int]] = []
    for row, tree in enumerate(trees):
        size = len(tree.tokens)
        tokens_BT[row, :size] = torch.tensor(tree.tokens)
        tokens_BT[row, size:] = tree.tokens[-1]  # one that the model knows how to read
        positions_BT[row, :size] = torch.tensor(tree.positions)
        ends_BT[row, :size] = torch.tensor(tree.ends)
        reads += [(row * width + place, target, option) for place, target, option in tree.reads]
    rows, targets, options = (np.array(part, dtype=np.int64) for part in zip(*reads, strict=True))
    return ItemBatch(
        tokens_BT,
        positions_BT,
        ends_BT,
        torch.from_numpy(rows),
        torch.from_numpy(targets),
        options,
        trees[0].branched,
    )


def fed_tokens(windows: Sequence[Window], *, branches: bool) -> int:
    """Return how many tokens go through a model, padding left out."""
    return sum(len(tree.tokens) for tree in _trees(windows, branches=branches))


class ItemStream:
    """Batches of items and where their hidden states are."""

    def __init__(
        self,
        model: BlockModel,
        parts: Sequence[Sequence[Window]],
        states: HiddenStates,
        routes: RoutingWatch,
        *,
        embedded: str = "items/embedded",
    ) -> None:
        """Hold items of one model; before the first block all of its streams are the same."""
        self._embedded, self._routes = embedded, routes
        self._model, self._states, self._count = model, states, sum(map(len, parts))
        longest = max((len(w.tokens) - 1 for windows in parts for w in windows), default=0)
        # A mask is made for a whole tree, and each of its sequences is rotated by its own length.
        branches = 0 < longest <= model.pad_until and model.takes_branches(longest)
        self.batches = make_item_batches(parts, branches=branches, pad_until=model.pad_until)
        self._called: dict[int, dict[int, Arguments]] = {}  # by batch, then by block
        self._room = MASKS_NBYTES

    def embed(self) -> None:
        for k, batch in enumerate(self.batches):
            if batch.branched:
                hidden_BTD, _ = self._branched(k, batch)
            else:
                hidden_BTD = self._model.embed(batch.tokens_BT)
            self._states.put(self._embedded, k, hidden_BTD)

    def drop_embedded(self, index: int = 0) -> None:
        """Drop what no stream reads behind a block."""
        self._states.drop(self._embedded)
        self._states.drop_given(self._embedded, self._model.links.passed(index))

    def advance(self, stream: str, block: Block) -> None:
        for k, batch in enumerate(self.batches):
            called = self._arguments(k, batch)[block.index] if batch.branched else None
            entering_BTD = self._states.entering(f"items/{stream}", self._embedded, block, k)
            entering_BTD = self._routes.marked(entering_BTD, BatchPlace("items", k))
            hidden_BTD = block.forward(entering_BTD, called)
            self._states.put(f"items/{stream}", k, hidden_BTD)

    def read_out(self, stream: str, tally: Tally) -> None:
        """Turn hidden states into the losses of options."""
        nll, greedy = list[Tensor](), list[Tensor]()
        for k, batch in enumerate(self.batches):
            hidden_BTD = self._states.get(f"items/{stream}", k)
            nll_Q, greedy_Q = self._model.target_nll(hidden_BTD, batch.rows_Q, batch.targets_Q)
            nll.append(nll_Q)
            greedy.append(greedy_Q)
        self._states.drop(f"items/{stream}")
        sums, likeliest = np.zeros(self._count), np.ones(self._count, dtype=np.bool_)
        for batch, nll_Q, greedy_Q in zip(self.batches, nll, greedy, strict=True):
            np.add.at(sums, batch.options_Q, nll_Q.double().numpy())
            np.logical_and.at(likeliest, batch.options_Q, greedy_Q.numpy())
        tally.options = sums, likeliest

    def _arguments(self, k: int, batch: ItemBatch) -> dict[int, Arguments]:
        return self._called.get(k) or self._branched(k, batch)[1]

    def _branched(self, k: int, batch: ItemBatch) -> tuple[Tensor, dict[int, Arguments]]:
        mask_B1TT = batch.mask(self._model.dtype, self._model.device)
        hidden_BTD, arguments = self._model.branched(batch.tokens_BT, batch.positions_BT, mask_B1TT)
        if k not in self._called and mask_B1TT.nbytes <= self._room:
            self._called[k] = arguments
            self._room -= mask_B1TT.nbytes
        return hidden_BTD, arguments
