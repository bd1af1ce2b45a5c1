"""Windows of tokens grouped into batches of one fixed geometry.

Windows of similar length go together and are padded on the right with their last token. Attention
is causal, so a token never sees what stands after it: padding changes no score and needs no mask;
padded positions are left out of every sum. Where the positions of a token depend on the length of
its window (`pad_until`), windows go with those of their own length alone. The geometry depends on
the corpus and the model's configuration, never on the machine, because batch size is known to move
scores in the last digits.

The items of tasks go in batches in which what options share is fed once.

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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qaudit.items.tokens import PADDED
from qaudit.model.proven import NO_LIMIT
from qaudit.planning.machine import TREE_TOKENS
from qaudit.types import UNSCORED, Corpus, RolloutChoices, Window

TOKENS_PER_BATCH = 4096
_ROUND = 32  # pad lengths to a multiple, so that few shapes have to be recorded


@dataclass(frozen=True, eq=False)
class Batch:
    """Some windows side by side, and where in the corpus they come from."""

    tokens_BT: Tensor
    windows: tuple[int, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]  # the first scored position of each
    roles_BT: Tensor | None = None  # of conversations, as windows have them
    # Of rollouts, whose windows count behind those of documents.
    choices: RolloutChoices | None = None
    drawn_BT: Tensor | None = None  # of rollouts: tokens that were drawn, and that a mark reads
    pads: bool = True  # whether its windows would be the same beside longer ones

    def valid_BT(self) -> Tensor:
        positions_T = torch.arange(self.tokens_BT.shape[1])
        return positions_T < torch.tensor(self.lengths)[:, None]

    def scored_BT(self) -> Tensor:
        positions_T = torch.arange(self.tokens_BT.shape[1])
        scored_BT = self.valid_BT() & (positions_T >= torch.tensor(self.starts)[:, None])
        return scored_BT if self.roles_BT is None else scored_BT & (self.roles_BT != UNSCORED)

    def of_rows(self, rows: slice) -> Batch:
        """Return some of the windows, or all in another order."""
        order = list(range(len(self.windows)))[rows]
        parts: dict[str, Any] = {
            name: part[order] if isinstance(part, Tensor) else part[rows]
            for name, part in vars(self).items()
            if isinstance(part, Tensor | tuple)
        }
        return replace(self, **parts)


def make_batches(
    windows: Sequence[Window],
    context: int,
    tokens_per_batch: int = TOKENS_PER_BATCH,
    pad_until: int = NO_LIMIT,
) -> tuple[Batch, ...]:
    """Group windows by length into batches of at most `tokens_per_batch` positions.

    Windows of more than `pad_until` tokens are not padded, nor others to more than that.
    """
    order = sorted(range(len(windows)), key=lambda w: (-len(windows[w].tokens), w))
    batches: list[Batch] = []
    position = 0
    while position < len(order):
        length = len(windows[order[position]].tokens)
        pads = length <= pad_until
        width = min(padded(length, max(context, length)), pad_until) if pads else length
        rows = max(1, tokens_per_batch // width)
        chosen = order[position : position + rows]
        if not pads:
            chosen = [w for w in chosen if len(windows[w].tokens) == length]
        some = [windows[w] for w in chosen]
        tokens_BT, roles_BT = torch.zeros(len(some), width, dtype=torch.long), None
        if any(window.roles is not None for window in some):
            roles_BT = torch.full(tokens_BT.shape, UNSCORED, dtype=torch.int8)
        for row, window in enumerate(some):
            tokens = torch.from_numpy(window.tokens.astype("int64"))
            tokens_BT[row, : len(tokens)] = tokens
            # One of the text itself: NaN of another would reach the text at a weight of zero.
            tokens_BT[row, len(tokens) :] = tokens[-1]
            if roles_BT is not None:
                roles_BT[row, : len(tokens)] = torch.from_numpy(window.roles)
        lengths = tuple(len(window.tokens) for window in some)
        starts = tuple(window.scored_from for window in some)
        batches.append(Batch(tokens_BT, tuple(chosen), lengths, starts, roles_BT, pads=pads))
        position += len(chosen)
    return tuple(batches)


def make_rollout_batches(
    corpus: Corpus, tokens_per_batch: int = TOKENS_PER_BATCH, pad_until: int = NO_LIMIT
) -> tuple[Batch, ...]:
    """Group rollouts into batches of their own: those of documents are as without them."""
    if corpus.rollouts is None:
        return ()
    rollouts, first = corpus.rollouts, len(corpus.evaluation)
    batches = make_batches(rollouts.windows, rollouts.longest, tokens_per_batch, pad_until)
    marked = []
    for batch in batches:
        # The positions whose token was drawn, and that a mark reads.
        drawn_BT = torch.zeros(batch.tokens_BT.shape, dtype=torch.bool)
        if rollouts.mark is not None and rollouts.read is not None:
            # Samples without a mark, too: they may be marked later, and nothing is measured again.
            windows = list(batch.windows)
            read_B = np.where(rollouts.greedy[windows], 0, rollouts.read[windows])
            ends_B1 = torch.from_numpy(np.array(batch.starts) + read_B)[:, None]
            drawn_BT = batch.scored_BT() & (torch.arange(drawn_BT.shape[1]) < ends_B1)
        behind = tuple(first + w for w in batch.windows)
        marked.append(replace(batch, windows=behind, choices=rollouts.choices, drawn_BT=drawn_BT))
    return tuple(marked)


def backwards(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Return the same windows, last batch first and last row first: sums round otherwise."""
    return tuple(batch.of_rows(slice(None, None, -1)) for batch in reversed(batches))


def padded(length: int, context: int) -> int:
    return min(context, -(-length // _ROUND) * _ROUND)


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
    tasks: Sequence[Sequence[Window]], *, branches: bool, pad_until: int = NO_LIMIT
) -> tuple[ItemBatch, ...]:
    """Group the options of items into batches; each window is one option.

    Tasks share no batch, so that the losses of one do not depend on what is measured beside it.
    Beyond `pad_until` tokens a window is that of one length: nothing begins it, or pads it.
    """
    batches: list[ItemBatch] = []
    first = 0
    for windows in tasks:
        trees: list[_Tree] = []
        fed = [window.tokens[:-1].astype(np.int64) for window in windows]
        for k in sorted(range(len(fed)), key=lambda k: (fed[k].astype(">i8").tobytes(), k)):
            shared = trees[-1].shared(fed[k]) if trees else 0
            alone = shared < len(fed[k]) > pad_until
            if not trees or alone or not trees[-1].takes(fed[k], shared, branches=branches):
                trees.append(_Tree())
                shared = 0
            trees[-1].add(first + k, windows[k], shared)
        for tree in trees:
            tree.close(0)
        # By length, and what branches last.
        trees.sort(key=lambda tree: (tree.branched, -len(tree.tokens)))
        while trees:
            longest = trees[0]
            length = len(longest.tokens)
            width = max(length, min(-(-length // PADDED) * PADDED, pad_until))
            some = trees[: max(1, TOKENS_PER_BATCH // width)]
            some = [tree for tree in some if tree.branched == longest.branched]
            if length > pad_until:
                some = [tree for tree in some if len(tree.tokens) == length]
            tokens_BT, positions_BT = torch.zeros(2, len(some), width, dtype=torch.long)
            ends_BT = torch.arange(1, width + 1).repeat(len(some), 1)  # padding sees itself alone
            reads: list[tuple[int, int, int]] = []
            for row, tree in enumerate(some):
                size = len(tree.tokens)
                tokens_BT[row, :size] = torch.tensor(tree.tokens)
                tokens_BT[row, size:] = tree.tokens[-1]  # one that the model knows how to read
                positions_BT[row, :size] = torch.tensor(tree.positions)
                ends_BT[row, :size] = torch.tensor(tree.ends)
                reads += [
                    (row * width + place, token, option) for place, token, option in tree.reads
                ]
            rows_Q, targets_Q, options_Q = np.array(reads, dtype=np.int64).T.copy()
            scored_Q = torch.from_numpy(rows_Q), torch.from_numpy(targets_Q), options_Q
            batches.append(ItemBatch(tokens_BT, positions_BT, ends_BT, *scored_Q, longest.branched))
            del trees[: len(some)]
        first += len(windows)
    return tuple(batches)
