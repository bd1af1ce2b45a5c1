"""Which experts each stream's routers choose, beside the choice in full precision.

Routers are not quantized, and yet they choose otherwise: they read what quantized blocks before
them return. Of every scored token and layer of experts two numbers are kept, summed by window:
whether the set of experts is that of full precision, and the mass that moved, which is half the
L1 distance between the routing weights of the two, each normalized to sum to 1.

With `--set routing=reference` streams are given the choice of full precision, experts and weights,
in calibration and in evaluation, so that what is measured is what rounding does to experts alone.

Where a block runs says which batch runs: hidden states are marked as they enter it.

Shapes: B windows, T tokens, N = B x T, K experts of a token, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qaudit.engine.batches import Batch
from qaudit.engine.tally import Tally
from qaudit.errors import ModelError
from qaudit.model.experts import Experts
from qaudit.model.groups import Block

EVALUATION = "evaluation"
REPLAYED = "experts are chosen as in full precision (`--set routing=reference`)"


BatchPlace = tuple[str, int]
"""A part of the text, and a batch of it."""


@dataclass(frozen=True, eq=False)
class ChosenExperts:
    """What the experts of a layer are given beside their tokens; no index where it is in those."""

    index_NK: Tensor | None
    weights_NK: Tensor

    @classmethod
    def of(cls, experts: Experts, hidden: Tensor, *routing: Tensor) -> ChosenExperts:
        if routing:
            index_NK, weights_NK = routing[:2]
            return cls(index_NK.to(torch.int32), weights_NK)
        # Llama 4 scales each expert's tokens by its router, and those of others by zero.
        rows_END = hidden.reshape(experts.count, -1, hidden.shape[-1])
        return cls(None, rows_END.float().norm(dim=-1).t())

    def shares(self, count: int) -> tuple[Tensor, Tensor]:
        """Return which experts read a token, and the share of each in its weights: (N, E)."""
        weights = self.weights_NK.float()
        if self.index_NK is None:
            shares_NE, chosen_NE = weights, weights > 0
        else:
            index_NK = self.index_NK.long()
            shares_NE = weights.new_zeros(len(weights), count).scatter_add_(1, index_NK, weights)
            chosen_NE = torch.zeros_like(shares_NE, dtype=torch.bool).scatter_(1, index_NK, True)
        total_N1 = shares_NE.sum(1, keepdim=True)
        return chosen_NE, shares_NE / torch.where(total_N1 == 0, 1.0, total_N1)


class RoutingWatch:
    """The choices of full precision in the blocks that are passed, and who is compared with it."""

    def __init__(self, batches: Sequence[Batch], *, replays: bool = False) -> None:
        """Compare what is chosen for batches of evaluation text, or replay what was chosen."""
        self._batches, self.replays = batches, replays
        self._full: dict[tuple[int, str, BatchPlace], ChosenExperts] = {}  # by block and module
        self._marks: Any = WeakIdKeyDictionary()  # hidden states -> their place
        self._tally: Tally | None = None
        self._is_full = False

    def marked(self, hidden_BTD: Tensor, place: BatchPlace) -> Tensor:
        """Return hidden states, and know their place when they enter a block."""
        self._marks[hidden_BTD] = place
        return hidden_BTD

    @contextmanager
    def of(self, tally: Tally, *, is_full: bool) -> Iterator[None]:
        """Take what is chosen in a `with` body as full precision's, or compare it with that."""
        before = self._tally, self._is_full
        self._tally, self._is_full = tally, is_full
        try:
            yield
        finally:
            self._tally, self._is_full = before

    def forget(self) -> None:
        self._full.clear()

    def choose(
        self, block: Block, name: str, experts: Experts, hidden: Tensor, *routing: Tensor
    ) -> tuple[Tensor, ...] | None:
        """See what experts of a block are given; return the routing to take in place of that."""
        if self._tally is None or block.entered is None:
            return None
        place: BatchPlace | None = self._marks.get(block.entered)
        if place is None:
            return None
        key = (block.index, name, place)
        if self._is_full:
            if self.replays and not routing:
                raise ModelError(
                    f"`{type(experts.source).__name__}` scales tokens by their routing before "
                    "experts see them, and another routing cannot be put in its place",
                    hint="leave `--set routing=reference` out for this model",
                )
            if self.replays or place[0] == EVALUATION:
                self._full[key] = ChosenExperts.of(experts, hidden, *routing)
            return None
        full = self._full.get(key)
        if full is None:
            return None
        if self.replays:
            assert full.index_NK is not None
            return full.index_NK.long(), full.weights_NK
        if place[0] == EVALUATION:
            own = ChosenExperts.of(experts, hidden, *routing)
            # LongCat numbers experts that do nothing behind the others.
            count = experts.count + int(getattr(experts.source, "zero_expert_num", 0) or 0)
            (were_NE, full_NE), (are_NE, own_NE) = full.shares(count), own.shares(count)
            batch = self._batches[place[1]]
            scored_BT = batch.scored_BT().to(own_NE.device)
            same_BT = (were_NE == are_NE).all(1).view(scored_BT.shape)
            moved_BT = ((full_NE - own_NE).abs().sum(1) / 2).view(scored_BT.shape)
            sums_2B = torch.stack([
                torch.where(scored_BT, values_BT.double(), 0.0).sum(1)
                for values_BT in (same_BT, moved_BT)
            ])  # fmt: skip
            layer = block.index, name
            self._tally.routing.setdefault(layer, []).append((batch.windows, sums_2B))
        return None
