"""What one stream has cost, stored and measured so far.

Which experts each stream's routers choose, beside the choice in full precision.

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

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qaudit.core.linears import Quantized
from qaudit.engine.batches import Batch
from qaudit.errors import ModelError, SourceError
from qaudit.model.experts import Experts
from qaudit.model.groups import Block

_COUNTED = ("bits", "weights", "notes")


@dataclass(eq=False)
class Tally:
    """What one stream has cost and stored so far; becomes a measurement."""

    # What was read out of each batch, as `ComparedRows` names it: (B, T), or (B, T, G).
    rows: list[dict[str, Tensor]] = field(default_factory=list)
    from_reference: list[dict[str, Tensor]] = field(
        default_factory=list
    )  # compared with the reference
    options: tuple[np.ndarray, np.ndarray] | None = None  # of items: losses, and if likeliest
    host_seconds: float = 0.0
    # Where a GPU computes: events before and after, which are read when nothing waits for it, and
    # how many streams share the time.
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = field(default_factory=list)
    bits: int = 0
    weights: int = 0
    linears: set[str] = field(default_factory=set)  # as blocks call them
    notes: list[str] = field(default_factory=list)
    mixture: dict[str, str] = field(default_factory=dict)  # bits of each linear, by block
    nbytes: int | None = None  # of all tensors, where a file stores them
    error: SourceError | None = None  # why there is nothing to measure
    # Tokens that each expert was calibrated on, by block and module.
    expert_tokens: dict[tuple[int, str], dict[int, int]] = field(default_factory=dict)
    # By block and module of experts: windows, and (2, B) sums over their scored tokens: how many
    # have full precision's experts, and the mass that moved.
    routing: dict[tuple[int, str], list[tuple[tuple[int, ...], Tensor]]] = field(
        default_factory=dict
    )

    @property
    def seconds(self) -> float:
        """Seconds that the stream took, once all its spans are over."""
        for _, end, _ in self.spans[-1:]:
            end.synchronize()
        milliseconds = (float(b.elapsed_time(end)) / count for b, end, count in self.spans)
        return self.host_seconds + sum(milliseconds) / 1000

    @property
    def bits_per_weight(self) -> float:
        """Bits per quantized weight, scales and zero points included."""
        return self.bits / self.weights if self.weights else 0.0

    def count(self, quantized: Quantized) -> None:
        self.bits += quantized.bits
        self.weights += sum(w.numel() for w in quantized.weights.values())
        self.linears |= quantized.weights.keys()
        self.note(*quantized.notes)

    def state(self) -> dict[str, Any]:
        """Return what blocks have added, as JSON takes it; what the head adds is not in it."""
        return {
            "seconds": self.seconds,
            "linears": sorted(self.linears),
            **{name: getattr(self, name) for name in _COUNTED},
            "expert_tokens": [
                [*layer, list(counts.items())] for layer, counts in self.expert_tokens.items()
            ],
            "routing": [
                [*layer, [[windows, sums_2B.tolist()] for windows, sums_2B in batches]]
                for layer, batches in self.routing.items()
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what blocks had added before."""
        self.host_seconds, self.linears = state["seconds"], set(state["linears"])
        for name in _COUNTED:
            setattr(self, name, state[name])
        self.expert_tokens = {
            (block, module): {int(index): tokens for index, tokens in counts}
            for block, module, counts in state["expert_tokens"]
        }
        self.routing = {
            (block, module): [
                (tuple(windows), torch.tensor(sums, dtype=torch.float64)) for windows, sums in some
            ]
            for block, module, some in state["routing"]
        }

    def note_experts(self) -> None:
        """Note the experts that no calibration token reached."""
        layers = self.expert_tokens
        few = {layer: [*counts.values()].count(0) for layer, counts in layers.items()}
        if not any(few.values()):
            return
        layer, most = max(few.items(), key=lambda item: item[1])
        self.note(
            f"{sum(few.values())} of {sum(map(len, layers.values()))} experts saw no calibration "
            "token and are rounded to nearest; most of them in block "
            f"{layer[0]}, {most} of {len(layers[layer])}"
        )

    def note(self, *notes: str) -> None:
        self.notes.extend(note for note in notes if note not in self.notes)

    @property
    def nll(self) -> list[Tensor]:
        """The loss of each token, (B, T) of each batch."""
        return columns(self.rows, "nll_N")

    @property
    def kl(self) -> list[Tensor]:
        """The same of divergence from full precision; empty where nothing is compared."""
        return columns(self.rows, "kl_N")

    def read(
        self,
        shape: tuple[int, int],
        rows: Mapping[str, Tensor],
        from_reference: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add a batch of (windows, tokens); each row predicts the token behind it.

        `from_reference` are its rows compared with the reference.
        """
        self.rows.append({"nll_N": torch.zeros(shape)} | _behind(shape, rows))
        if from_reference:
            self.from_reference.append(_behind(shape, from_reference))

    def of_batches(self, batches: slice) -> Tally:
        """Return what was read out of some batches."""
        return replace(self, rows=self.rows[batches], from_reference=self.from_reference[batches])


def columns(rows: Sequence[Mapping[str, Tensor]], name: str) -> list[Tensor]:
    """Return one result of all batches; nothing where it was not computed."""
    present = [batch[name] for batch in rows if name in batch]
    return present if len(present) == len(rows) else []


def _behind(shape: tuple[int, int], rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return rows as (B, T) on the host; position 0 has nothing before it, and 0."""
    batch, length = shape
    behind = {}
    for name, rows_N in rows.items():
        rows_BT = rows_N.cpu().reshape(batch, length - 1, *rows_N.shape[1:])
        first_B1 = rows_BT.new_zeros(batch, 1, *rows_N.shape[1:])
        behind[name] = torch.cat([first_B1, rows_BT], 1)
    return behind


@contextmanager
def timed(device: torch.device, *tallies: Tally) -> Iterator[None]:
    """Add the seconds of a `with` body to tallies that share it; a GPU's are of its stream."""
    if device.type == "cuda":
        began, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        began.record(stream)
        yield
        end.record(stream)
        for tally in tallies:
            tally.spans.append((began, end, len(tallies)))
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        for tally in tallies:
            tally.host_seconds += seconds / len(tallies)


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
        entered = block.entered if self._tally is not None else None
        place: BatchPlace | None = None if entered is None else self._marks.get(entered)
        if self._tally is None or place is None:
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
        if full is not None and self.replays:
            assert full.index_NK is not None
            return full.index_NK.long(), full.weights_NK
        if full is not None and place[0] == EVALUATION:
            own = ChosenExperts.of(experts, hidden, *routing)
            # LongCat numbers experts that do nothing behind the others.
            count = experts.count + int(getattr(experts.source, "zero_expert_num", 0) or 0)
            (were_NE, full_NE), (are_NE, own_NE) = full.shares(count), own.shares(count)
            batch = self._batches[place[1]]
            scored_BT = batch.scored_BT().to(own_NE.device)
            same_BT = (were_NE == are_NE).all(1).view(scored_BT.shape)
            moved_BT = ((full_NE - own_NE).abs().sum(1) / 2).view(scored_BT.shape)
            both = (same_BT.double(), moved_BT.double())
            sums_2B = torch.stack([torch.where(scored_BT, each, 0.0).sum(1) for each in both])
            layers = self._tally.routing
            layers.setdefault((block.index, name), []).append((batch.windows, sums_2B))
        return None
