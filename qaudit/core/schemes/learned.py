"""FlatQuant, SpinQuant and OSTQuant, each learned one group of linears at a time.

What they have in common is in `qaudit/core/learned.py`: a transformation in front of the linears
that read one input, learned on a sample of the calibration text so that their rounded product is
near the exact one. `steps` says for how long; the same text and steps give the same bits.

- `flatquant` (Sun et al., 2410.09426): an affine Kronecker product, a scale of each column that
  begins at SmoothQuant's with alpha 0.3, and shares of the ranges of tokens and weights, by Adam at
  5e-3 (shares at 5e-2), as published. Weights are rounded to nearest.
- `spinquant` (Liu et al., 2405.16406): a rotation, by Cayley steps, with tokens rounded and weights
  as they are meanwhile, as published; then GPTQ.
- `ostquant` (Hu et al., 2501.13987): a rotation and a scale of each column, with both rounded
  meanwhile; then GPTQ.

Simplified: the published methods learn on the outputs of a block (FlatQuant) or on the loss of the
whole model (SpinQuant, OSTQuant, with rotations that blocks share); here each group learns on its
own output. Rotations are Kronecker products, online in front of each group, where SpinQuant's and
OSTQuant's are folded into the residual and the heads. One share of the range is for all rows.
Matrices and scales are counted as bits; SpinQuant has no scales. Caches: `kv=int4`, rotated as
`quarot` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from qaudit.core.grid import fit_range, join_groups
from qaudit.core.learned import Goal, Transform, learn
from qaudit.core.linears import (
    Inputs,
    Linears,
    Quantized,
    decoded,
    largest_inputs,
    refuse_nonfinite,
    required_inputs,
    sampled_inputs,
)
from qaudit.core.scheme import Calibration, Scheme, check_bits
from qaudit.core.schemes.gptq import Gptq
from qaudit.core.schemes.int8 import smoothing_scales
from qaudit.core.schemes.quarot import UNROUNDED, round_tokens
from qaudit.errors import SchemeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from qaudit.core.stored import StoredWeight

ALPHA = 0.3  # of SmoothQuant's scales, where FlatQuant begins


@dataclass(frozen=True, kw_only=True)
class FlatQuant(Scheme):
    """Learn an affine transformation of each input, then round to nearest (FlatQuant)."""

    name: ClassVar[str] = "flatquant"
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM

    bits: int
    act: int = 4
    steps: int = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits)
        if self.act != UNROUNDED:
            check_bits(self.act)
        if not 0 <= self.steps <= 100_000:
            raise SchemeError(f"{self.steps} steps are out of range", hint="use 0 to 100000")

    @property
    def rotates_heads(self) -> bool:
        return True

    @property
    def transforms_inputs(self) -> bool:
        return True

    def quantize(self, linears: Linears) -> Quantized:
        import torch

        refuse_nonfinite(linears)
        sample_TC = sampled_inputs(linears, self.name)
        wide = {n: w.detach().float().contiguous() for n, w in linears.weights.items()}
        goal = self._goal()
        turn = learn(sample_TC, torch.cat(list(wide.values())), self._start(linears), goal)
        turned = {name: turn.of_weights(weight_RC) for name, weight_RC in wide.items()}
        stored, notes = self._round(linears, turned, turn)

        def inputs(x: Tensor) -> Tensor:
            turned = turn.of_inputs(x.float())
            if self.act != UNROUNDED:
                turned = round_tokens(turned, self.act, float(turn.token_clip))
            return turned.to(x.dtype)

        quantized = decoded(linears, stored, notes, inputs=inputs)
        return replace(quantized, bits=quantized.bits + turn.nbits(scaling=goal.scaling))

    def _goal(self) -> Goal:
        act = None if self.act == UNROUNDED else self.act
        return Goal(self.steps, act, self.bits, orthogonal=False, scaling=True, clipping=True)

    def _start(self, linears: Linears) -> Transform:
        return Transform.start(smoothing_scales(linears, largest_inputs(linears, self.name), ALPHA))

    def _round(
        self, linears: Linears, turned: Mapping[str, Tensor], turn: Transform
    ) -> tuple[Mapping[str, StoredWeight], tuple[str, ...]]:
        stored = {}
        for name, weight_RC in turned.items():
            part_R1C = weight_RC[:, None]
            largest = turn.weight_clip * part_R1C.abs().amax(-1, keepdim=True)
            grid = fit_range(-largest, largest, self.bits, symmetric=True, scale_dtype="bf16")
            parts = [(grid, grid.codes(part_R1C))]
            stored[name] = join_groups(parts, self.bits, -1, symmetric=True, scale_dtype="bf16")
        return stored, ()


class _Rotated(FlatQuant):
    """What SpinQuant and OSTQuant share: rotations, and GPTQ behind them."""

    def _start(self, linears: Linears) -> Transform:
        import torch

        first = next(iter(linears.weights.values()))
        return Transform.start(torch.ones(first.shape[1], device=first.device))

    def _round(
        self, linears: Linears, turned: Mapping[str, Tensor], turn: Transform
    ) -> tuple[Mapping[str, StoredWeight], tuple[str, ...]]:
        given = required_inputs(linears, self.name)
        inputs = Inputs(turn.of_gram(given.gram_CC), given.absmean_C, given.tokens)
        rounding = Gptq(bits=self.bits, group=-1, act_group_aware=False, damp=0.01)
        alone = replace(linears, weights=turned, inputs=inputs, fold_C=None)
        rounded = rounding.quantize(alone)
        return rounded.stored, rounded.notes


@dataclass(frozen=True, kw_only=True)
class SpinQuant(_Rotated):
    """Learn a rotation of each input by Cayley steps, then round by GPTQ (SpinQuant)."""

    name: ClassVar[str] = "spinquant"
    version: ClassVar[int] = 2

    steps: int = 100

    def _goal(self) -> Goal:
        act = None if self.act == UNROUNDED else self.act
        return Goal(self.steps, act, None, orthogonal=True, scaling=False, clipping=False)


@dataclass(frozen=True, kw_only=True)
class OstQuant(_Rotated):
    """Learn a rotation and a scale of each input, then round by GPTQ (OSTQuant)."""

    name: ClassVar[str] = "ostquant"

    steps: int = 100

    def _goal(self) -> Goal:
        act = None if self.act == UNROUNDED else self.act
        return Goal(self.steps, act, self.bits, orthogonal=True, scaling=True, clipping=False)
