"""Atom: groups of four bits, and the 128 heaviest columns in eight.

Zhao et al., "Atom: Low-bit Quantization for Efficient and Accurate LLM Serving" (2310.19102).
Columns are ordered by the mean square of their inputs. The last 128 are rounded to 8 bits, the
others to 4 in groups of 128: weights by GPTQ, whose errors go on to the last columns, the range of
a group cut to 0.85 (`weight_clip`); activations by token and group, symmetric, the largest
magnitude of a group cut to 0.9 of itself (`clip`). Inputs of all linears of a block are taken
before the first is quantized. Its cache of 4 bits is `atom-4bit:kv=int4`.

Simplified: at most one column in 16 has 8 bits, and a note says so; within a block, statistics of
GPTQ are of inputs that are not rounded; columns are ordered by inputs of the scheme's own stream;
each row has scales of its own, where the published settings let two rows share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qaudit.core.activations import by_group
from qaudit.core.grid import Grid, fit_range, quantize_groups
from qaudit.core.linears import (
    Linears,
    Quantized,
    StoredWeight,
    decoded,
    refuse_nonfinite,
    required_inputs,
)
from qaudit.core.outliers import DAMPED, Split, round_mixed
from qaudit.core.scheme import Calibration, Scheme, check_bits, check_group
from qaudit.core.schemes.gptq import Gptq
from qaudit.core.schemes.quarot import check_clip, round_tokens, searched
from qaudit.core.schemes.quik import check_kept
from qaudit.support.lazy import Tensor

KEPT_BITS = 8


@dataclass(frozen=True, kw_only=True)
class _CutGptq(Gptq):
    """GPTQ onto symmetric grids over a share of the range of each group."""

    act_group_aware: bool = False
    share: float = 1.0

    def _fit(self, weight_KR: Tensor) -> Grid:
        smallest_1R, largest_1R = (
            self.share * bound for bound in weight_KR.aminmax(dim=0, keepdim=True)
        )
        return fit_range(smallest_1R, largest_1R, self.bits, symmetric=True, scale_dtype="bf16")


@dataclass(frozen=True, kw_only=True)
class Atom(Scheme):
    """Round the heaviest columns to 8 bits and groups of the others to few (Atom)."""

    name: ClassVar[str] = "atom"
    version: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = Calibration.OWN_BLOCKS
    rounds_columns: ClassVar[bool] = True

    bits: int
    act: int = 4
    group: int = 128
    keep: int = 128
    clip: float = 0.9
    weight_clip: float = 0.85
    damp: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits)
        check_bits(self.act)
        check_group(self.group)
        check_kept(self.keep)
        check_clip(self.clip)
        check_clip(self.weight_clip)
        Gptq(bits=self.bits, damp=self.damp)

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        diagonal_C = required_inputs(linears, self.name).gram_CC.diagonal()
        split = Split.by(diagonal_C, self.keep)
        rounding = _CutGptq(bits=self.bits, group=self.group, damp=DAMPED, share=self.weight_clip)
        stored, notes = round_mixed(
            linears, split, rounding.quantize, _eight_bits, damp=self.damp, indices=len(diagonal_C)
        )
        group = len(split.rest_I) if self.group == -1 else self.group

        def round_rest(x: Tensor) -> Tensor:
            return by_group(x, group, lambda part: round_tokens(part, self.act, self.clip))

        def inputs(x: Tensor) -> Tensor:
            return split.around(x.float(), round_rest, _kept).to(x.dtype)

        return decoded(linears, stored, notes, inputs=inputs)


def _kept(x: Tensor) -> Tensor:
    return round_tokens(x, KEPT_BITS)


def _eight_bits(weight_RC: Tensor) -> StoredWeight:
    lay = partial(searched, bits=KEPT_BITS, dim=-1, search=False)
    return quantize_groups(weight_RC, KEPT_BITS, -1, symmetric=True, scale_dtype="bf16", lay=lay)
