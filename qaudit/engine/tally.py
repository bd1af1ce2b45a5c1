"""What one stream has cost, stored and measured so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qaudit.core.linears import Quantized
from qaudit.errors import SourceError

_COUNTED = ("bits", "weights", "notes")


@dataclass(eq=False)
class Tally:
    """What one stream has cost and stored so far; becomes a measurement."""

    # What was read out of each batch, as `ComparedRows` names it: (B, T), or (B, T, G).
    rows: list[dict[str, Tensor]] = field(default_factory=list)
    beside: list[dict[str, Tensor]] = field(default_factory=list)  # compared with the reference
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

    def kept(self) -> dict[str, Any]:
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

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take what blocks had added before."""
        self.host_seconds, self.linears = kept["seconds"], set(kept["linears"])
        for name in _COUNTED:
            setattr(self, name, kept[name])
        self.expert_tokens = {
            (block, module): {int(index): tokens for index, tokens in counts}
            for block, module, counts in kept["expert_tokens"]
        }
        self.routing = {
            (block, module): [
                (tuple(windows), torch.tensor(sums, dtype=torch.float64)) for windows, sums in some
            ]
            for block, module, some in kept["routing"]
        }

    def note_experts(self) -> None:
        """Note the experts that no calibration token reached."""
        few = {
            layer: sum(not tokens for tokens in counts.values())
            for layer, counts in self.expert_tokens.items()
        }
        if not any(few.values()):
            return
        layer, most = max(few.items(), key=lambda item: item[1])
        experts = sum(map(len, self.expert_tokens.values()))
        self.note(
            f"{sum(few.values())} of {experts} experts saw no calibration token and are rounded to "
            f"nearest; most of them in block {layer[0]}, {most} of {len(self.expert_tokens[layer])}"
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
        beside: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add a batch of (windows, tokens); each row predicts the token behind it.

        `beside` are its rows compared with the reference.
        """
        self.rows.append({"nll_N": torch.zeros(shape)} | _behind(shape, rows))
        if beside:
            self.beside.append(_behind(shape, beside))

    def of_batches(self, batches: slice) -> Tally:
        """Return what was read out of some batches."""
        return replace(self, rows=self.rows[batches], beside=self.beside[batches])


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
