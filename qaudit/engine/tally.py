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

from qaudit.core.fidelity import ComparedRows
from qaudit.core.linears import Quantized
from qaudit.errors import SourceError
from qaudit.model.experts import ExpertPart

_COUNTED = ("bits", "weights", "notes")


@dataclass(eq=False)
class Tally:
    """What one stream has cost and stored so far; becomes a measurement."""

    nll: list[Tensor] = field(default_factory=list)  # one (B, T) a batch
    kl: list[Tensor] = field(default_factory=list)  # the same, empty where nothing is compared
    same_top: list[Tensor] = field(default_factory=list)
    output_error: list[Tensor] = field(default_factory=list)  # the same; of streamed models
    confidence: list[Tensor] = field(default_factory=list)  # of what others are compared with
    beside: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # the same to the reference
    # Of batches of rollouts: (B, T) `likeliest_N` of rows, (B, T, G) what ends it, (B, T) its
    # log-probability as it was drawn, (B, T) the entropy of what full precision drew from.
    chosen: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = field(default_factory=list)
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

    def saw(self, block: int, expert: ExpertPart, tokens: int) -> None:
        """Count the calibration tokens of an expert."""
        self.expert_tokens.setdefault((block, expert.module), {})[expert.index] = tokens

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

    def read(
        self,
        shape: tuple[int, int],
        chunks: Sequence[ComparedRows],
        beside: Sequence[ComparedRows] = (),
    ) -> None:
        """Add a batch of (windows, tokens); each row predicts the token behind it.

        `beside` are its rows compared with the reference.
        """
        errors = [rows.output_error_N for rows in chunks if rows.output_error_N is not None]
        sure = [rows.confidence_N for rows in chunks if rows.confidence_N is not None]
        losses = [rows.nll_N for rows in chunks]
        for more, kept in ((errors, self.output_error), (sure, self.confidence)):
            if chunks and len(more) == len(chunks):  # both in one copy, for which the host waits
                both = torch.stack([torch.cat(losses), torch.cat(more).to(losses[0])]).cpu()
                losses = [both[0]]
                kept.append(_behind(shape, [both[1]]))
        self.nll.append(_behind(shape, losses))
        if (compared := _compared(shape, chunks)) is not None:
            self.kl.append(compared[0])
            self.same_top.append(compared[1])
        if (compared := _compared(shape, beside)) is not None:
            self.beside.append(compared)
        likeliest = [rows.likeliest_N for rows in chunks if rows.likeliest_N is not None]
        ends = [rows.ends_NG for rows in chunks if rows.ends_NG is not None]
        drawn = [rows.drawn_N for rows in chunks if rows.drawn_N is not None]
        entropy = [rows.entropy_N for rows in chunks if rows.entropy_N is not None]
        if likeliest:
            groups = torch.cat(ends).unbind(1)
            columns = [_behind(shape, [column_N]) for column_N in groups]
            ends_BTG = torch.stack(columns, 2) if columns else torch.zeros(*shape, 0)
            entropy_BT = _behind(shape, entropy) if entropy else None
            drawn_BT = _behind(shape, drawn)
            self.chosen.append((_behind(shape, likeliest), ends_BTG, drawn_BT, entropy_BT))

    def of_batches(self, batches: slice) -> Tally:
        """Return what was read out of some batches."""
        names = ("nll", "kl", "same_top", "output_error", "confidence", "beside")
        return replace(self, **{name: getattr(self, name)[batches] for name in names})


def _compared(
    shape: tuple[int, int], chunks: Sequence[ComparedRows]
) -> tuple[Tensor, Tensor] | None:
    """Return divergences and agreement of a batch; None where it was compared with nothing."""
    kl = [rows.kl_N for rows in chunks if rows.kl_N is not None]
    same_top = [rows.same_top_N for rows in chunks if rows.same_top_N is not None]
    if not chunks or len(kl) != len(chunks):
        return None
    return _behind(shape, kl), _behind(shape, same_top)


def _behind(shape: tuple[int, int], chunks: Sequence[Tensor]) -> Tensor:
    """Return rows as (B, T) on the host; position 0 has nothing before it, and 0."""
    if not chunks:
        return torch.zeros(shape)
    rows_N = torch.cat(list(chunks)).cpu()
    batch, length = shape
    return torch.nn.functional.pad(rows_N.reshape(batch, length - 1), (1, 0))


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
