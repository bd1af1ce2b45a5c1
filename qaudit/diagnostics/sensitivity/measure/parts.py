"""Many partly quantized models in one pass: each block is quantized once, and shared by all.

All variants take their quantized weights from the same statistics, those of the full-precision
stream. So a block is quantized once for each number of bits, however many variants there are,
and a variant costs its evaluation alone. What is given up: a scheme that calibrates on its own
past (GPTQ) is calibrated here on the unquantized model's, and all of it quantized this way is
close to what the audit measures under that scheme, and not the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qaudit.core.linears import Quantized
from qaudit.core.scheme import Calibration, Scheme
from qaudit.diagnostics.roles import role_of
from qaudit.diagnostics.sensitivity.choice import Variant
from qaudit.engine.block_pass import Progress
from qaudit.engine.gathering import Captured, capture_inputs
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tally import Tally, timed
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import Block, BlockModel

_FULL = "calibration/full"


@dataclass(frozen=True, eq=False)
class Storage:
    """How many weights each role has with so many bits each, and what those take to store."""

    weights: dict[tuple[str, int], int]
    bits: dict[tuple[str, int], float]


@torch.no_grad()
def run_partly(
    model: BlockModel,
    feed: Feed,
    scheme: Scheme,
    variants: Sequence[Variant],
    streams: HiddenStates,
    progress: Progress,
) -> tuple[Mapping[Variant, Tally], Storage]:
    """Send the evaluation through every variant; return a tally each, and what roles take."""
    walk = _PartsWalk(model, feed, scheme, {variant: Tally() for variant in variants}, streams)
    walk.embed()
    storage = Storage({}, {})
    for block in model.blocks():
        walk.pass_block(block, storage, progress)
    progress(model.num_blocks, model.num_blocks, "head")
    for number, tally in enumerate(walk.tallies.values()):
        for k, batch in enumerate(feed.evaluation):
            hidden_BTD = streams.get(f"evaluation/{number}", k)
            tally.nll.append(model.nll(hidden_BTD, batch.tokens_BT).cpu())
        streams.drop(f"evaluation/{number}")
    return walk.tallies, storage


@dataclass(frozen=True, eq=False)
class _PartsWalk:
    model: BlockModel
    feed: Feed
    scheme: Scheme
    tallies: Mapping[Variant, Tally]
    streams: HiddenStates

    def embed(self) -> None:
        parts = {_FULL: self.feed.calibration, "evaluation": self.feed.evaluation}
        for name, batches in parts.items():
            for k, batch in enumerate(batches):
                hidden_BTD = self.model.embed(batch.tokens_BT.to(self.model.device))
                self.streams.put(name, k, hidden_BTD)

    def pass_block(self, block: Block, storage: Storage, progress: Progress) -> None:
        """Quantize a block for each number of bits, and send every variant through its mixture."""

        def report(what: str) -> None:
            progress(block.index, self.model.num_blocks, what)

        report(self.scheme.short)
        captured = self._captured(block)
        by_bits = {bits: self._quantized(block, bits, captured) for bits in self._bits()}
        for bits, weights in by_bits.items():
            _count(storage, bits, weights)
        for number, (variant, tally) in enumerate(self.tallies.items()):
            report(f"{variant.part} {variant.name}")
            with timed(self.model.device, tally):
                self._evaluate(block, number, variant, by_bits)
        if block.index == 0:
            self.streams.drop("evaluation")
        for embedded in (_FULL, "evaluation"):
            self.streams.drop_given(embedded, self.model.links.passed(block.index))

    def _bits(self) -> list[int]:
        return sorted({bits for variant in self.tallies for _, bits in variant.bits})

    def _captured(self, block: Block) -> Captured | None:
        if self.scheme.calibration is Calibration.NONE:
            return None
        batches = (
            (self.streams.entering(_FULL, _FULL, block, k), batch.valid_BT())
            for k, batch in enumerate(self.feed.calibration)
        )

        def keep(k: int, hidden_BTD: Tensor) -> None:
            self.streams.put(_FULL, k, hidden_BTD)

        return capture_inputs(block, batches, keep)

    def _quantized(
        self, block: Block, bits: int, captured: Captured | None
    ) -> dict[str, tuple[Tensor, float]]:
        """Return every linear's quantized weight with what it takes, as part of its group."""
        scheme: Scheme = replace(self.scheme, bits=bits)  # type: ignore[call-arg]
        weights_of: dict[str, tuple[Tensor, float]] = {}
        for group in block.groups:
            inputs = None if captured is None else captured.get(group)
            linears = block.linears(group, inputs)
            quantized = scheme.quantize(replace(linears, column_loop=self.feed.column_loop))
            weights = sum(weight_RC.numel() for weight_RC in quantized.weights.values())
            for name, weight_RC in quantized.weights.items():
                # A group's linears have the same columns: what each row takes is the same.
                weights_of[name] = weight_RC, quantized.bits * weight_RC.numel() / weights
        return weights_of

    def _evaluate(
        self, block: Block, number: int, variant: Variant, by_bits: Mapping[int, Mapping[str, Any]]
    ) -> None:
        weights = {
            name: by_bits[bits][name][0]
            for group in block.groups
            for name in group.linears
            if (bits := variant.bits_of(block.index, name)) is not None
        }
        block.install(Quantized(weights, bits=0))
        for k in range(len(self.feed.evaluation)):
            stream = f"evaluation/{number}"
            entering_BTD = self.streams.entering(stream, "evaluation", block, k)
            self.streams.put(stream, k, block.forward(entering_BTD))
        block.restore()


def _count(storage: Storage, bits: int, weights: Mapping[str, tuple[Tensor, float]]) -> None:
    for name, (weight_RC, taken) in weights.items():
        part = role_of(name), bits
        storage.bits[part] = storage.bits.get(part, 0.0) + taken
        storage.weights[part] = storage.weights.get(part, 0) + weight_RC.numel()
