"""Windows of tokens grouped into batches of one fixed geometry.

Windows of similar length go together and are padded on the right with their last token. Attention
is causal, so a token never sees what stands after it: padding changes no score and needs no mask;
padded positions are left out of every sum. Where the positions of a token depend on the length of
its window (`pad_until`), windows go with those of their own length alone. The geometry depends on
the corpus and the model's configuration, never on the machine, because batch size is known to move
scores in the last digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qaudit.model.proven import NO_LIMIT
from qaudit.types import UNSCORED, Corpus, RolloutChoices, RolloutText, Window

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

    @property
    def is_rollouts(self) -> bool:
        return self.choices is not None

    def valid_BT(self) -> Tensor:
        positions_T = torch.arange(self.tokens_BT.shape[1])
        return positions_T < torch.tensor(self.lengths)[:, None]

    def scored_BT(self) -> Tensor:
        positions_T = torch.arange(self.tokens_BT.shape[1])
        scored_BT = self.valid_BT() & (positions_T >= torch.tensor(self.starts)[:, None])
        return scored_BT if self.roles_BT is None else scored_BT & (self.roles_BT != UNSCORED)

    def part(self, rows: slice) -> Batch:
        return Batch(
            self.tokens_BT[rows],
            self.windows[rows],
            self.lengths[rows],
            self.starts[rows],
            None if self.roles_BT is None else self.roles_BT[rows],
            self.choices,
            None if self.drawn_BT is None else self.drawn_BT[rows],
            self.pads,
        )


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
        batches.append(replace(_batch(windows, tuple(chosen), width), pads=pads))
        position += len(chosen)
    return tuple(batches)


def make_rollout_batches(
    corpus: Corpus, tokens_per_batch: int = TOKENS_PER_BATCH, pad_until: int = NO_LIMIT
) -> tuple[Batch, ...]:
    """Group rollouts into batches of their own: those of documents are as without them."""
    if corpus.rollouts is None:
        return ()
    rollouts, first = corpus.rollouts, len(corpus.evaluation)
    return tuple(
        replace(
            batch,
            windows=tuple(first + w for w in batch.windows),
            choices=rollouts.choices,
            drawn_BT=_drawn_BT(batch, rollouts),
        )
        for batch in make_batches(rollouts.windows, rollouts.longest, tokens_per_batch, pad_until)
    )


def _drawn_BT(batch: Batch, rollouts: RolloutText) -> Tensor:
    """Mark the positions whose token was drawn, and that a mark reads."""
    if rollouts.mark is None or rollouts.read is None:
        return torch.zeros(batch.tokens_BT.shape, dtype=torch.bool)
    windows = list(batch.windows)
    # Samples without a mark, too: they may be marked later, and nothing is measured again.
    read_B = np.where(rollouts.greedy[windows], 0, rollouts.read[windows])
    ends_B = np.array(batch.starts) + read_B
    positions_T = torch.arange(batch.tokens_BT.shape[1])
    return batch.scored_BT() & (positions_T < torch.from_numpy(ends_B)[:, None])


def backwards(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Return the same windows, last batch first and last row first: sums round otherwise."""
    return tuple(
        Batch(
            batch.tokens_BT.flip(0),
            batch.windows[::-1],
            batch.lengths[::-1],
            batch.starts[::-1],
            None if batch.roles_BT is None else batch.roles_BT.flip(0),
            pads=batch.pads,
        )
        for batch in reversed(batches)
    )


def padded(length: int, context: int) -> int:
    return min(context, -(-length // _ROUND) * _ROUND)


def _batch(windows: Sequence[Window], chosen: tuple[int, ...], width: int) -> Batch:
    tokens_BT = torch.zeros(len(chosen), width, dtype=torch.long)
    roles_BT = None
    if any(windows[w].roles is not None for w in chosen):
        roles_BT = torch.full((len(chosen), width), UNSCORED, dtype=torch.int8)
    for row, w in enumerate(chosen):
        tokens = torch.from_numpy(windows[w].tokens.astype("int64"))
        tokens_BT[row, : len(tokens)] = tokens
        # A token of the text itself: NaN of another one would reach the text at a weight of zero.
        tokens_BT[row, len(tokens) :] = tokens[-1]
        if roles_BT is not None:
            roles_BT[row, : len(tokens)] = torch.from_numpy(windows[w].roles)
    lengths = tuple(len(windows[w].tokens) for w in chosen)
    starts = tuple(windows[w].scored_from for w in chosen)
    return Batch(tokens_BT, chosen, lengths, starts, roles_BT)
