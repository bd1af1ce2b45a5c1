"""One subject, once through its blocks, the full-precision stream and every scheme side by side.

    embed -> for each block: [ full precision | scheme | scheme | ... ] -> one head for all

A block's tensors are read once. The full-precision streams go through it first; then for each
scheme the block's linears are quantized and that scheme's evaluation stream goes through the
quantized block. Schemes that calibrate on their own, already quantized, past carry a
calibration stream of their own and are quantized while it passes (`staged.py`); schemes that
calibrate on the full-precision model share its statistics. No quantized model ever exists as
a whole, and none is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qaudit.core.scheme import Calibration, Inputs, Linears, Quantized, Scheme
from qaudit.engine.batches import Batch
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.true_sequential import (
    Quantize,
    capture_inputs,
    quantize_by_returning,
    quantize_in_passing,
)
from qaudit.model.allocator import share_one_arena
from qaudit.model.blocks import Block, BlockModel, Group
from qaudit.planning.waiting import waiting_nbytes
from qaudit.types import FULL_PRECISION

Progress = Callable[[int, int, str], None]
"""Called as (blocks done, blocks in all, what is being done)."""

Observer = Callable[[Scheme, Linears, Quantized], str | None]
"""Shown what each scheme made of each group; what it says becomes a note."""

_EMBEDDED = "embedded"  # the streams before the first block, the same for every scheme


@dataclass(eq=False)
class Tally:
    """What one stream has cost and stored so far; becomes a measurement."""

    nll: list[Tensor] = field(default_factory=list)  # one (B, T) a batch
    seconds: float = 0.0
    bits: int = 0
    weights: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        """Bits per quantized weight, scales and zero points included."""
        return self.bits / self.weights if self.weights else 0.0

    def count(self, quantized: Quantized) -> None:
        """Add what a group of linears costs to store, and what was noted about it."""
        self.bits += quantized.bits
        self.weights += sum(w.numel() for w in quantized.weights.values())
        self.note(*quantized.notes)

    def note(self, *notes: str) -> None:
        """Keep what is worth saying, once."""
        self.notes.extend(note for note in notes if note not in self.notes)


@dataclass(frozen=True, eq=False)
class Feed:
    """The batches that go through: for calibration, and for evaluation."""

    calibration: Sequence[Batch]
    evaluation: Sequence[Batch]
    full_precision: bool = True  # whether the model is evaluated as it is, too


@torch.no_grad()
def run_blocks(
    model: BlockModel,
    feed: Feed,
    schemes: Sequence[Scheme],
    streams: HiddenStates,
    progress: Progress = lambda done, total, what: None,
    observe: Observer = lambda scheme, linears, quantized: None,
) -> Mapping[str, Tally]:
    """Send everything through the model once; return a tally for `fp` and for each spec."""
    share_one_arena()
    tallies = {FULL_PRECISION: Tally(), **{scheme.spec: Tally() for scheme in schemes}}
    walk = _Walk(model, feed, schemes, streams, tallies, observe)
    walk.embed()
    for block in model.blocks():
        walk.pass_block(block, partial(progress, block.index, model.num_blocks))
    progress(model.num_blocks, model.num_blocks, "head")
    walk.read_out()
    for scheme in schemes:
        if scheme.remark is not None:
            tallies[scheme.spec].note(scheme.remark)
    return tallies


@dataclass(frozen=True, eq=False)
class _Walk:
    model: BlockModel
    feed: Feed
    schemes: Sequence[Scheme]
    streams: HiddenStates
    tallies: Mapping[str, Tally]
    observe: Observer

    def embed(self) -> None:
        """Put the embedded tokens into the streams all schemes start from."""
        for part, batches in self._parts().items():
            for k, batch in enumerate(batches):
                hidden_BTD = self.model.embed(batch.tokens_BT.to(self.model.device))
                self.streams.put(f"{part}/{_EMBEDDED}", k, hidden_BTD)

    def pass_block(self, block: Block, say: Callable[[str], None]) -> None:
        """Send every stream through one block."""
        last = block.index == self.model.num_blocks - 1
        say(FULL_PRECISION)
        with timed(self.tallies[FULL_PRECISION], self.model.device):
            captured = self._full_precision(block, last)
            if self.feed.full_precision:
                self._evaluate(block, FULL_PRECISION)
        for scheme in self.schemes:
            say(scheme.short)
            tally = self.tallies[scheme.spec]
            with timed(tally, self.model.device):
                self._quantize(block, scheme, captured, last)
                self._evaluate(block, scheme.spec)
                block.restore()
        if block.index == 0:
            for part in self._parts():
                self.streams.drop(f"{part}/{_EMBEDDED}")

    def read_out(self) -> None:
        """Turn every evaluation stream into losses per token."""
        for name, tally in self.tallies.items():
            if name == FULL_PRECISION and not self.feed.full_precision:
                continue
            with timed(tally, self.model.device):
                for k, batch in enumerate(self.feed.evaluation):
                    hidden_BTD = self.streams.get(f"evaluation/{name}", k)
                    tally.nll.append(self.model.nll(hidden_BTD, batch.tokens_BT).cpu())
            self.streams.drop(f"evaluation/{name}")

    def _parts(self) -> dict[str, Sequence[Batch]]:
        calibrated = any(s.calibration is not Calibration.NONE for s in self.schemes)
        calibration = self.feed.calibration if calibrated else ()
        return {"calibration": calibration, "evaluation": self.feed.evaluation}

    def _source(self, part: str, stream: str, block: Block) -> str:
        return f"{part}/{_EMBEDDED if block.index == 0 else stream}"

    def _evaluate(self, block: Block, stream: str) -> None:
        source = self._source("evaluation", stream, block)
        for k in range(len(self.feed.evaluation)):
            hidden_BTD = block.forward(self.streams.get(source, k))
            self.streams.put(f"evaluation/{stream}", k, hidden_BTD)

    def _full_precision(self, block: Block, last: bool) -> dict[str, Inputs]:
        """Pass the calibration stream through the block as it is, if a scheme wants to see it."""
        if not any(s.calibration is Calibration.FULL_PRECISION for s in self.schemes):
            return {}
        name = f"calibration/{FULL_PRECISION}"

        def keep(k: int, hidden_BTD: Tensor) -> None:
            if not last:
                self.streams.put(name, k, hidden_BTD)

        captured = capture_inputs(block, self._calibration(FULL_PRECISION, block), keep)
        if last:
            self.streams.drop(name)
        return captured

    def _quantize(
        self, block: Block, scheme: Scheme, captured: Mapping[str, Inputs], last: bool
    ) -> None:
        """Leave the block quantized by `scheme`."""

        tally = self.tallies[scheme.spec]

        def quantize(group: Group, inputs: Inputs | None) -> Quantized:
            linears = block.linears(group, inputs)
            quantized = scheme.quantize(linears)
            tally.count(quantized)
            if (said := self.observe(scheme, linears, quantized)) is not None:
                tally.note(said)
            return quantized

        if scheme.calibration is Calibration.OWN_STREAM:
            self._true_sequential(block, scheme.spec, quantize, last)
        else:
            for group in block.groups:
                block.install(quantize(group, captured.get(group.name)))
        if scheme.calibration is Calibration.FULL_PRECISION:
            tally.note(*block.notes)  # which scales could not be folded here

    def _true_sequential(self, block: Block, stream: str, quantize: Quantize, last: bool) -> None:
        """Quantize each group on inputs that went through those before it, in one pass if it fits.

        What leaves the block is kept under another name until no batch has to enter it again.
        """
        if self._fits_inside(block):
            batches = list(self._calibration(stream, block))
            outputs, _ = quantize_in_passing(block, batches, quantize)
            self._advance(stream, outputs, last)
            return
        left = f"calibration/{stream}/left"

        def keep(k: int, hidden_BTD: Tensor) -> None:
            if not last:
                self.streams.put(left, k, hidden_BTD)

        quantize_by_returning(block, lambda: self._calibration(stream, block), quantize, keep)
        self.streams.drop(f"calibration/{stream}")
        self.streams.rename(left, f"calibration/{stream}")

    def _fits_inside(self, block: Block) -> bool:
        """Say whether all calibration batches may wait inside a block at once."""
        tokens = sum(batch.tokens_BT.numel() for batch in self.feed.calibration)
        matrices = [block.weight(name) for group in block.groups for name in group.linears]
        hidden = matrices[0].shape[1]  # the first group reads the residual
        widest = max(side for matrix in matrices for side in matrix.shape)
        waiting = waiting_nbytes(tokens, hidden, widest, matrices[0].element_size())
        return waiting <= self.streams.limit_nbytes

    def _calibration(self, stream: str, block: Block) -> Iterator[tuple[Tensor, Tensor]]:
        source = self._source("calibration", stream, block)
        for k, batch in enumerate(self.feed.calibration):
            yield self.streams.get(source, k), batch.valid_BT()

    def _advance(self, stream: str, outputs: Sequence[Tensor], last: bool) -> None:
        """Store what came out, unless no block is left to read it."""
        if last:
            self.streams.drop(f"calibration/{stream}")
            return
        for k, hidden_BTD in enumerate(outputs):
            self.streams.put(f"calibration/{stream}", k, hidden_BTD)


@contextmanager
def timed(tally: Tally, device: torch.device) -> Iterator[None]:
    """Add the seconds a `with` body takes to a tally."""
    began = time.perf_counter()
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        tally.seconds += time.perf_counter() - began


def document_sums(
    batches: Sequence[Batch], nll: Sequence[Tensor], windows: Sequence[tuple[int, int]], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sum losses and scored tokens over documents; `windows` holds (document, scored_from)."""
    sums, tokens = np.zeros(count), np.zeros(count, dtype=np.int64)
    for batch, nll_BT in zip(batches, nll, strict=True):
        for row, (w, length) in enumerate(zip(batch.windows, batch.lengths, strict=True)):
            document, scored_from = windows[w]
            sums[document] += float(nll_BT[row, scored_from:length].double().sum())
            tokens[document] += length - scored_from
    return sums, tokens
