"""The slow way, for a model whose blocks cannot be run one at a time: whole, and in memory.

Some models link their blocks by more than hidden states (shared caches, inputs per layer).
They are run as the library runs them. A scheme quantizes the blocks in place, first to last,
each calibrated by a pass of the whole model; then the whole model is evaluated and its weights
are put back. That costs the memory of a model and, for a scheme that calibrates, a pass of the
calibration set per block. What is given up is said in a note: a block's groups are calibrated
together instead of one after another, and AWQ's scales are not folded, because no fold can be
proved on a block that does not run alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.core.scheme import Calibration, Inputs, Quantized, Scheme
from qaudit.engine.block_pass import Progress, timed
from qaudit.engine.streams import Feed, Observer, Tally
from qaudit.engine.true_sequential import capture_inputs
from qaudit.model.blocks import Block
from qaudit.model.groups import Group, find_structure, must_be_linear
from qaudit.types import FULL_PRECISION

NOTE = (
    "run whole, not block by block: a block's groups are calibrated together, "
    "and scales are not folded"
)


@torch.no_grad()
def run_resident(
    model: Any,
    blocks: Sequence[nn.Module],
    feed: Feed,
    schemes: Sequence[Scheme],
    progress: Progress = lambda done, total, what: None,
    observe: Observer = lambda scheme, linears, quantized: None,
) -> Mapping[str, Tally]:
    """Measure a whole model in memory; return a tally for `fp` and for each spec."""
    whole = _Whole(model, tuple(_wrap(model, i, block) for i, block in enumerate(blocks)), feed)
    tallies = {FULL_PRECISION: Tally(), **{scheme.spec: Tally() for scheme in schemes}}
    if feed.full_precision:
        with timed(tallies[FULL_PRECISION], model.device):
            tallies[FULL_PRECISION].nll = whole.losses()
    shared = whole.full_precision_inputs(schemes)
    for k, scheme in enumerate(schemes):
        progress(k, len(schemes), scheme.short)
        with timed(tallies[scheme.spec], model.device):
            whole.quantize(scheme, shared, tallies[scheme.spec], observe)
            tallies[scheme.spec].nll = whole.losses()
            for block in whole.blocks:
                block.restore()
    for tally in tallies.values():
        tally.note(NOTE)
    return tallies


@dataclass(frozen=True, eq=False)
class _Whole:
    model: Any
    blocks: tuple[Block, ...]
    feed: Feed

    def losses(self) -> list[Tensor]:
        """Return the loss of every token of every evaluation batch, one window at a time."""
        return [
            torch.stack([self._losses(tokens_T) for tokens_T in batch.tokens_BT])
            for batch in self.feed.evaluation
        ]

    def _losses(self, tokens_T: Tensor) -> Tensor:
        logits_TV = self._logits(tokens_T[None])[0, :-1].float()
        losses_T = torch.zeros(len(tokens_T))
        targets_T = tokens_T[1:].to(logits_TV.device)
        losses_T[1:] = nn.functional.cross_entropy(logits_TV, targets_T, reduction="none").cpu()
        return losses_T

    def _logits(self, tokens_BT: Tensor) -> Tensor:
        out = self.model(input_ids=tokens_BT.to(self.model.device), use_cache=False)
        logits_BTV: Tensor = out.logits
        return logits_BTV

    def full_precision_inputs(self, schemes: Sequence[Scheme]) -> list[dict[str, Inputs]]:
        """Return each block's statistics in the unquantized model, if a scheme wants them."""
        if not any(s.calibration is Calibration.FULL_PRECISION for s in schemes):
            return [{} for _ in self.blocks]
        return [self._capture(block) for block in self.blocks]

    def quantize(
        self,
        scheme: Scheme,
        shared: Sequence[Mapping[str, Inputs]],
        tally: Tally,
        observe: Observer,
    ) -> None:
        """Quantize every block in place, first to last."""
        for block, inputs in zip(self.blocks, shared, strict=True):
            if scheme.calibration is Calibration.OWN_STREAM:
                inputs = self._capture(block)
            for group in block.groups:
                linears = block.linears(group, inputs.get(group.name))
                quantized: Quantized = scheme.quantize(linears)
                tally.count(quantized)
                if (said := observe(scheme, linears, quantized)) is not None:
                    tally.note(said)
                block.install(quantized)

    def _capture(self, block: Block) -> dict[str, Inputs]:
        return capture_inputs(block, self._calibration(), forward=self._logits)

    def _calibration(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.feed.calibration:
            yield batch.tokens_BT, batch.valid_BT()


def _wrap(model: Any, index: int, module: nn.Module) -> Block:
    """See a block of the whole model as schemes see one, without a way to run it alone."""
    must_be_linear(module, f"block {index}")
    probe_BT = torch.arange(16, device=model.device)[None]
    structure = find_structure(module, lambda _: model(input_ids=probe_BT, use_cache=False).logits)
    groups = tuple(Group("+".join(linears), linears) for linears in structure.readers)
    return Block(index, module, groups, (), partial(_cannot_run_alone, index))


def _cannot_run_alone(index: int, shape: tuple[int, int]) -> Any:
    raise AssertionError(f"block {index} of a resident model was asked to run alone")
