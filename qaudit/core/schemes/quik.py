"""QUIK: most columns and activations in four bits, the columns with outliers as they are.

Ashkboos et al., "QUIK: Towards End-to-End 4-Bit Inference on Generative Large Language Models"
(2310.09259). The 256 columns whose inputs reach the largest magnitudes stay in 16 bits, weights and
activations. The others are rounded by GPTQ, symmetric, one scale a row, whose errors the kept
columns take up; their activations by token, asymmetric. The last linears of a block (down) are in
8 bits, weights and activations.

Simplified: at most one column in 16 is kept, and a note says so; scales of weights are not searched
for; no layer goes without outliers; magnitudes are those of the scheme's own stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qaudit.core.grid import fit
from qaudit.core.linears import Linears, Quantized, decoded, largest_inputs, refuse_nonfinite
from qaudit.core.outliers import PlainColumns, Split, round_mixed
from qaudit.core.scheme import Calibration, Scheme, check_bits
from qaudit.core.schemes.gptq import Gptq
from qaudit.errors import SchemeError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Quik(Scheme):
    """Keep columns with outliers in 16 bits, round the others and activations (QUIK)."""

    name: ClassVar[str] = "quik"
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM

    bits: int
    act: int = 4
    down: int = 8
    keep: int = 256
    damp: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        for bits in (self.bits, self.act, self.down):
            check_bits(bits)
        check_kept(self.keep)
        Gptq(bits=self.bits, damp=self.damp)

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        split = Split.by(largest_inputs(linears, self.name), self.keep)
        bits, act = (self.down, self.down) if linears.is_last else (self.bits, self.act)
        rounding = Gptq(bits=bits, group=-1, act_group_aware=False, damp=self.damp)
        indices = len(split.kept_K)
        stored, notes = round_mixed(
            linears, split, rounding, PlainColumns.of, damp=self.damp, indices=indices
        )

        def round_rest(x: Tensor) -> Tensor:
            return fit(x, act, symmetric=False, dim=-1).snap(x)

        def inputs(x: Tensor) -> Tensor:
            return split.around(x.float(), round_rest, lambda kept: kept).to(x.dtype)

        return decoded(linears, stored, notes, inputs=inputs)


def check_kept(count: int) -> None:
    """Refuse a number of columns below zero."""
    if count < 0:
        raise SchemeError(f"{count} columns cannot keep more bits", hint="use 0 or more")
