"""GPTAQ: GPTQ that also makes up for what quantization did to its inputs.

Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration" (2504.02692;
GPTQv2 before). GPTQ keeps each linear's output on the inputs x that quantized earlier blocks
produce; GPTAQ aims at the output of the unquantized model, whose linear reads x':

    min over Q of  sum over tokens of ||Q x - W x'||^2

Beside the rounding errors of GPTQ, a column feeds w_j (x'_j - x_j) to the columns behind it, as
far as these can make up for it. With the inverse Hessian as R^T R, R upper triangular, and the
drift D = sum of (x' - x) x^T, what column j adds to the columns behind it is its value times row j
of

    P = alpha * triu(D R^T, 1) R

as published, `alpha=0.25` included, which is a setting of its authors' code. Here feedback is
pulled (`qaudit/core/gptq_solver.py`). With H = U E U^T that makes it

    S = P U = alpha * triu(D U^-T, 1) E^-1

the same numbers by one triangular solve.

Everything else, grids, orders and damping, is as in `gptq`. Calibration sends the text through the
full-precision and the scheme's own model side by side. With no drift the result is that of `gptq`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.gptq_solver import Hessian, Start
from qaudit.core.linears import Inputs
from qaudit.core.scheme import Calibration
from qaudit.core.schemes.gptq import Gptq
from qaudit.errors import SchemeError
from qaudit.support.lazy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class Gptaq(Gptq):
    """Round columns in turn, making up for errors of earlier linears too (GPTAQ)."""

    name: ClassVar[str] = "gptaq"
    version: ClassVar[int] = 1
    calibration: ClassVar[Calibration] = Calibration.BOTH_STREAMS
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    remarks: ClassVar[Mapping[str, str]] = {}

    alpha: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise SchemeError(f"an alpha of {self.alpha} is out of range", hint="use 0 to 1")

    def _start(
        self, weight_CR: Tensor, gram_CC: Tensor, inputs: Inputs, hessian: Hessian
    ) -> Start | None:
        if inputs.drift_CC is None or not self.alpha:
            return None
        drift_CC = hessian.ordered(inputs.drift_CC.to(gram_CC))
        # X U^T = D, and only what is above the diagonal of X feeds columns that come later.
        fed_CC = torch.linalg.solve_triangular(
            hessian.lower_CC, drift_CC, upper=False, left=False, unitriangular=True
        )
        fed_CC = torch.triu(fed_CC, 1).mul_(self.alpha / hessian.diagonal_C)
        return Start(pull_CC=fed_CC.T.contiguous())
