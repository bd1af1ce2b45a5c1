"""Atom: groups of four bits, and the 128 heaviest columns in eight.

Zhao et al., "Atom: Low-bit Quantization for Efficient and Accurate LLM Serving" (2310.19102).
Columns are ordered by the mean square of their inputs. The last 128 are rounded to 8 bits, the
others to 4 in groups of 128: weights by GPTQ, whose errors go on to the last columns, activations
by token and group, symmetric, the largest magnitude of a group cut to 0.9 of itself. Its cache of
4 bits is `atom-4bit:kv=int4`.

Simplified: at most one column in 16 has 8 bits, and a note says so; scales of weights are not cut
to 0.85; statistics of GPTQ are of inputs that are not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qaudit.core.floats import by_group
from qaudit.core.grid import quantize_groups
from qaudit.core.linears import Linears, Quantized, decoded, refuse_nonfinite, required_inputs
from qaudit.core.outliers import Split, round_mixed
from qaudit.core.scheme import Calibration, Scheme, check_bits, check_group
from qaudit.core.schemes.gptq import Gptq
from qaudit.core.schemes.quarot import check_clip, round_tokens
from qaudit.core.schemes.quik import check_kept

if TYPE_CHECKING:
    from torch import Tensor

    from qaudit.core.stored import StoredWeight

KEPT_BITS = 8


@dataclass(frozen=True, kw_only=True)
class Atom(Scheme):
    """Round the heaviest columns to 8 bits and groups of the others to few (Atom)."""

    name: ClassVar[str] = "atom"
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM

    bits: int
    act: int = 4
    group: int = 128
    keep: int = 128
    clip: float = 0.9
    damp: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits)
        check_bits(self.act)
        check_group(self.group)
        check_kept(self.keep)
        check_clip(self.clip)
        Gptq(bits=self.bits, damp=self.damp)

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        diagonal_C = required_inputs(linears, self.name).gram_CC.diagonal()
        split = Split.by(diagonal_C, self.keep)
        rounding = Gptq(bits=self.bits, group=self.group, act_group_aware=False, damp=self.damp)
        stored, notes = round_mixed(
            linears, split, rounding, _eight_bits, damp=self.damp, indices=len(diagonal_C)
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
    return quantize_groups(weight_RC, KEPT_BITS, -1, symmetric=True, scale_dtype="bf16")
