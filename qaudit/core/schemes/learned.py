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
from typing import ClassVar

from qaudit.core.grid import join_groups
from qaudit.core.learned import Goal, Transform, check_steps, learn, share_grid
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
from qaudit.core.scheme import Calibration, Scheme, check_bits
from qaudit.core.schemes.int8 import smoothing_scales
from qaudit.core.schemes.quarot import UNROUNDED, SearchedGptq, round_tokens
from qaudit.support.lazy import Tensor, torch

ALPHA = 0.3  # of SmoothQuant's scales, where FlatQuant begins
CLIP = 0.9  # share of the range of tokens, where FlatQuant begins


@dataclass(frozen=True, kw_only=True)
class FlatQuant(Scheme):
    """Learn an affine transformation of each input, then round to nearest (FlatQuant)."""

    name: ClassVar[str] = "flatquant"
    version: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = Calibration.WHOLE_BLOCK

    bits: int
    act: int = 4
    steps: int = 150

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits)
        if self.act != UNROUNDED:
            check_bits(self.act)
        check_steps(self.steps)

    @property
    def rotates_heads(self) -> bool:
        return True

    @property
    def learning_steps(self) -> int:
        return self.steps

    @property
    def transforms_inputs(self) -> bool:
        return True

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        return self.train(alone(linears, self.name))(linears)

    def train(self, block: WholeBlock) -> Quantize:
        groups = self._groups(block)
        for linears in groups:
            refuse_nonfinite(linears)
        turns = learn(replace(block, groups=groups), self._start, self._goal(), self.steps)
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
            if self.act != UNROUNDED:
                turned = round_tokens(turned, self.act, float(turn.token_clip))
            return turned.to(x.dtype)

        quantized = decoded(linears, stored, notes, inputs=inputs)
        return replace(quantized, bits=quantized.bits + turn.nbits(scaling=self._goal().scaling))

    def _groups(self, block: WholeBlock) -> tuple[Linears, ...]:
        return block.calibrated()  # SmoothQuant's scales read the largest inputs

    def _goal(self) -> Goal:
        act = None if self.act == UNROUNDED else self.act
        return Goal(act, self.bits, orthogonal=False, scaling=True, clipping=True)

    def _start(self, linears: Linears) -> Transform:
        scale_C = smoothing_scales(linears, largest_inputs(linears, self.name), ALPHA)
        return Transform.start(scale_C, linears.weights, self.bits, CLIP)

    def _round(
        self, linears: Linears, turned: Mapping[str, Tensor], turn: Transform
    ) -> tuple[Mapping[str, StoredWeight], tuple[str, ...]]:
        stored = {}
        for name, weight_RC in turned.items():
            part_R1C, share_R11 = weight_RC[:, None], turn.row_clips[name][:, None]
            grid = share_grid(part_R1C, self.bits, share_R11, "bf16")
            parts = [(grid, grid.codes(part_R1C))]
            stored[name] = join_groups(parts, self.bits, -1, symmetric=True, scale_dtype="bf16")
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
        rounding = SearchedGptq(bits=self.bits, group=-1, damp=0.01)
        alone = replace(linears, weights=turned, inputs=inputs, fold_C=None)
        rounded = rounding.quantize(alone)
        return rounded.stored, rounded.notes


@dataclass(frozen=True, kw_only=True)
class SpinQuant(_Rotated):
    """Learn a rotation of each input by Cayley steps, then round by GPTQ (SpinQuant)."""

    name: ClassVar[str] = "spinquant"
    version: ClassVar[int] = 3

    def _goal(self) -> Goal:
        act = None if self.act == UNROUNDED else self.act
        return Goal(act, None, orthogonal=True, scaling=False, clipping=False)


@dataclass(frozen=True, kw_only=True)
class OstQuant(_Rotated):
    """Learn a rotation and a scale of each input, then round by GPTQ (OSTQuant)."""

    name: ClassVar[str] = "ostquant"
    version: ClassVar[int] = 2

    def _goal(self) -> Goal:
        act = None if self.act == UNROUNDED else self.act
        return Goal(act, self.bits, orthogonal=True, scaling=True, clipping=False)
