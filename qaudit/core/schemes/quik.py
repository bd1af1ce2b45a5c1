"""QUIK: most columns and activations in four bits, the columns with outliers as they are.

Ashkboos et al., "QUIK: Towards End-to-End 4-Bit Inference on Generative Large Language Models"
(2310.09259). The 256 columns whose inputs reach the largest magnitudes stay in 16 bits, weights and
activations. The others are rounded by GPTQ, symmetric, one scale a row, the best of 80 (`--w_clip`,
`qaudit/core/grid.py`), whose errors the kept columns take up; their activations by token,
asymmetric. The last linears of a block (down) are in 8 bits, weights and activations. Linears whose
inputs never exceed `threshold` keep no column; down, in 8 bits, where they never exceed twice that
(`--fp_threshold`, 0 by default there too). `search=false` leaves out the search for scales.

Simplified: at most one column in 16 is kept, and a note says so; down keeps as many columns as the
others (`--fp_relative` is not there); magnitudes are those of the scheme's own stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.grid import SHARES, fit
from qaudit.core.linears import Linears, Quantized, decoded, largest_inputs, refuse_nonfinite
from qaudit.core.outliers import DAMPED, PlainColumns, Split, round_mixed
from qaudit.core.scheme import Calibration, Scheme, check_bits
from qaudit.core.schemes.quarot import SearchedGptq
from qaudit.errors import SchemeError
from qaudit.support.lazy import Tensor


@dataclass(frozen=True, kw_only=True)
class Quik(Scheme):
    """Keep columns with outliers in 16 bits, round the others and activations (QUIK)."""

    name: ClassVar[str] = "quik"
    version: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM
    rounds_columns: ClassVar[bool] = True

    bits: int
    act: int = 4
    down: int = 8
    keep: int = 256
    threshold: float = 0.0
    damp: float = 0.01
    search: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for bits in (self.bits, self.act, self.down):
            check_bits(bits)
        check_kept(self.keep)
        if not self.threshold >= 0:
            raise SchemeError(
                f"inputs never exceed a threshold of {self.threshold}, or always do",
                hint="use threshold=0 to keep columns of every linear",
            )
        SearchedGptq(bits=self.bits, damp=self.damp)

    @property
    def trials(self) -> int:
        return len(SHARES) if self.search else 0

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        bits, act = (self.down, self.down) if linears.is_last else (self.bits, self.act)
        largest_C = largest_inputs(linears, self.name)
        threshold = self.threshold * (2 if bits > self.bits else 1)
        split = Split.by(largest_C, self.keep if float(largest_C.max()) > threshold else 0)
        rounding = SearchedGptq(bits=bits, group=-1, damp=DAMPED, search=self.search)
        indices = len(split.kept_K)
        stored, notes = round_mixed(
            linears, split, rounding.quantize, PlainColumns.of, damp=self.damp, indices=indices
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
