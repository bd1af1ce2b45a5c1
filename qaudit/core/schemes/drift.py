"""GPTQ towards the output of the unquantized model: GPTAQ and Qronos.

**GPTAQ** is GPTQ that also makes up for what quantization did to its inputs.

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

**Qronos** is GPTQ towards the output of the unquantized model, from the first column on.

Zhang et al., "Qronos: Correcting the Past by Shaping the Future... in Post-Training Quantization"
(2505.11695). The objective is that of `gptaq`, over inputs x that quantized earlier blocks
produce and x' that the unquantized model reads:

    min over Q of  sum over tokens of ||Q x - W x'||^2

Column by column, the column itself is first set to undo the error so far and rounded, then all
later columns move to where they minimize what is left. After the first column nothing is left to
undo, so that this is, in closed form,

    q_1       the first column, rounded from  w_1 + (W D)_1 / H_11
    later     GPTQ on  W + W D H^-1              H = sum of x x^T, D = sum of (x' - x) x^T

H is damped by `damp` times its largest eigenvalue, 1e-6 as published for weights alone, by 30 steps
of power iteration; the damping draws Q towards W, as in Brevitas. Where float32 cannot factorize
that, `damp_increment` raises it, and a note says so.

Everything else, grids and orders, is as in `gptq`. With no drift the result is that of `gptq` with
the same damping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.gptq_solver import Hessian, Start
from qaudit.core.linears import Inputs
from qaudit.core.scheme import Calibration
from qaudit.core.schemes.gptq import Gptq
from qaudit.support.lazy import Tensor, torch


class _ToFullPrecision(Gptq):
    """What both have in common: calibration on both streams, and no presets."""

    version: ClassVar[int] = 1
    calibration: ClassVar[Calibration] = Calibration.BOTH_STREAMS
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    remarks: ClassVar[Mapping[str, str]] = {}


@dataclass(frozen=True, kw_only=True)
class Gptaq(_ToFullPrecision):
    """Round columns in turn, making up for errors of earlier linears too (GPTAQ)."""

    name: ClassVar[str] = "gptaq"

    alpha: float = 0.25

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


@dataclass(frozen=True, kw_only=True)
class Qronos(_ToFullPrecision):
    """Undo what earlier linears changed, then round columns in turn (Qronos)."""

    name: ClassVar[str] = "qronos"
    damps_to_largest: ClassVar[bool] = True

    damp: float = 1e-6
    damp_increment: float = 1e-4

    def _start(
        self, weight_CR: Tensor, gram_CC: Tensor, inputs: Inputs, hessian: Hessian
    ) -> Start | None:
        if inputs.drift_CC is None:
            return None
        drift_CC = hessian.ordered(inputs.drift_CC.to(gram_CC))
        ordered_CR = weight_CR.index_select(0, hessian.order_C)
        pulled_CR = drift_CC.T @ ordered_CR  # of columns that never see an input, too
        first = gram_CC.diagonal()[hessian.order_C[0]]
        ordered_CR[(gram_CC.diagonal()[hessian.order_C] == 0).nonzero().flatten()] = 0
        first_R = ordered_CR[0] + pulled_CR[0] / torch.where(first == 0, 1.0, first)
        lower_CC = hessian.lower_CC
        moved_CR = torch.linalg.solve_triangular(
            lower_CC.T, pulled_CR, upper=True, unitriangular=True
        ).div_(hessian.diagonal_C[:, None])
        moved_CR = torch.linalg.solve_triangular(
            lower_CC, moved_CR, upper=False, unitriangular=True
        )
        return Start(weight_CR=moved_CR.add_(ordered_CR), first_R=first_R)
