"""FlatQuant, SpinQuant and OSTQuant, each learned one block at a time.

What they have in common is in `qaudit/core/learned.py`: a transformation in front of the linears
that read one input, all of a block learned together, so that what the rounded block returns is near
what the block of the unquantized model returns. `steps` says for how long; the same text and steps
give the same bits.

- `flatquant` (Sun et al., 2410.09426): an affine Kronecker product, a scale of each column that
  begins at SmoothQuant's with alpha 0.3, and shares of the ranges of tokens and of each row of a
  weight, by Adam at 5e-3 (shares at 5e-2), as published. Weights are rounded to nearest.
- `spinquant` (Liu et al., 2405.16406): a rotation, by Cayley steps, with tokens rounded and weights
  as they are meanwhile, as published; then GPTQ.
- `ostquant` (Hu et al., 2501.13987): a rotation and a scale of each column, with both rounded
  meanwhile; then GPTQ.

Simplified: FlatQuant's shares begin where a search puts them, not at 0.98, and it learns for fewer
steps. SpinQuant and OSTQuant are published with the loss of the whole model and rotations that
blocks share; here each block learns on its own output. Rotations are Kronecker products, online in
front of each group, where theirs are folded into the residual and the heads. GPTQ's scales are
those of `quarot`'s search. Matrices and scales are counted as bits; SpinQuant has no scales.
Caches: `kv=int4`, rotated as `quarot` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from qaudit.core.activations import round_tokens
from qaudit.core.grid import fit_share, quantize_groups
from qaudit.core.learned import Goal, Transform, learn
from qaudit.core.linears import (
    Inputs,
    Linears,
    Quantize,
    Quantized,
    StoredWeight,
    WholeBlock,
    alone,
    decoded,
    largest_inputs,
    refuse_nonfinite,
    required_inputs,
)
from qaudit.core.scheme import UNROUNDED, Calibration, Scheme
from qaudit.core.schemes.int8 import smoothing_scales
from qaudit.core.schemes.quarot import round_columns
from qaudit.support.lazy import Tensor, torch

ALPHA = 0.3  # of SmoothQuant's scales, where FlatQuant begins
CLIP = 0.9  # share of the range of tokens, where FlatQuant begins


@dataclass(frozen=True, kw_only=True)
class FlatQuant(Scheme):
    """Learn an affine transformation of each input, then round to nearest (FlatQuant)."""

    name: ClassVar[str] = "flatquant"
    version: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = Calibration.WHOLE_BLOCK
    transforms_inputs: ClassVar[bool] = True
    rotates_heads: ClassVar[bool] = True
    goal: ClassVar[Goal] = Goal(orthogonal=False, scaling=True, clipping=True)

    bits: int
    act: int = 4
    steps: int = 150

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        return self.train(alone(linears, self.name))(linears)

    def train(self, block: WholeBlock) -> Quantize:
        groups = self._groups(block)
        for linears in groups:
            refuse_nonfinite(linears)
        turns = learn(replace(block, groups=groups), self._start, self._goal, self.steps)
        by_names = {tuple(g.weights): turn for g, turn in zip(groups, turns, strict=True)}
        return lambda linears: self._apply(linears, by_names[tuple(linears.weights)])

    def _apply(self, linears: Linears, turn: Transform) -> Quantized:
        refuse_nonfinite(linears)
        turned = {
            n: turn.of_weights(w.detach().float().contiguous()) for n, w in linears.weights.items()
        }
        stored, notes = self._round(linears, turned, turn)

        def inputs(x: Tensor) -> Tensor:
            turned = turn.of_inputs(x.float())
            return round_tokens(turned, self.act, float(turn.token_clip)).to(x.dtype)

        quantized = decoded(linears, stored, notes, inputs=inputs)
        return replace(quantized, bits=quantized.bits + turn.nbits(scaling=self.goal.scaling))

    def _groups(self, block: WholeBlock) -> tuple[Linears, ...]:
        return block.calibrated()  # SmoothQuant's scales read the largest inputs

    @property
    def _goal(self) -> Goal:
        bits = self.bits if self.goal.bits is not None else None
        return replace(self.goal, act=None if self.act == UNROUNDED else self.act, bits=bits)

    def _start(self, linears: Linears) -> Transform:
        scale_C = smoothing_scales(linears, largest_inputs(linears, self.name), ALPHA)
        return Transform.start(scale_C, linears.weights, self.bits, CLIP)

    def _round(
        self, linears: Linears, turned: Mapping[str, Tensor], turn: Transform
    ) -> tuple[Mapping[str, StoredWeight], tuple[str, ...]]:
        stored = {}
        for name, weight_RC in turned.items():
            share_R11 = turn.row_clips[name][:, None]
            lay = partial(fit_share, bits=self.bits, share=share_R11, scale_dtype="bf16")
            stored[name] = quantize_groups(
                weight_RC, self.bits, -1, symmetric=True, scale_dtype="bf16", lay=lay
            )
        return stored, ()


class _Rotated(FlatQuant):
    """What SpinQuant and OSTQuant share: rotations, and GPTQ behind them."""

    rounds_columns: ClassVar[bool] = True

    def _groups(self, block: WholeBlock) -> tuple[Linears, ...]:
        return block.groups

    def _start(self, linears: Linears) -> Transform:
        first = next(iter(linears.weights.values()))
        ones_C = torch.ones(first.shape[1], device=first.device)
        return Transform.start(ones_C, linears.weights, self.bits)

    def _round(
        self, linears: Linears, turned: Mapping[str, Tensor], turn: Transform
    ) -> tuple[Mapping[str, StoredWeight], tuple[str, ...]]:
        given = required_inputs(linears, self.name)
        inputs = Inputs(turn.of_gram(given.gram_CC), given.absmean_C, given.tokens)
        alone = replace(linears, weights=turned, inputs=inputs, fold_C=None)
        rounded = round_columns(alone, self.bits, damp=0.01)
        return rounded.stored, rounded.notes


@dataclass(frozen=True, kw_only=True)
class SpinQuant(_Rotated):
    """Learn a rotation of each input by Cayley steps, then round by GPTQ (SpinQuant)."""

    name: ClassVar[str] = "spinquant"
    version: ClassVar[int] = 3
    goal: ClassVar[Goal] = Goal(bits=None, orthogonal=True, scaling=False, clipping=False)


@dataclass(frozen=True, kw_only=True)
class OstQuant(_Rotated):
    """Learn a rotation and a scale of each input, then round by GPTQ (OSTQuant)."""

    name: ClassVar[str] = "ostquant"
    version: ClassVar[int] = 2
    goal: ClassVar[Goal] = Goal(orthogonal=True, scaling=True, clipping=False)
