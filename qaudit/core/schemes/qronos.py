"""Qronos: GPTQ towards the output of the unquantized model, from the first column on.

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

from qaudit.core.gptq_solver import Hessian, Start, factorize
from qaudit.core.linears import Inputs
from qaudit.core.scheme import Calibration
from qaudit.core.schemes.gptq import Gptq
from qaudit.support.lazy import Tensor, torch

POWER_STEPS = 30


@dataclass(frozen=True, kw_only=True)
class Qronos(Gptq):
    """Undo what earlier linears changed, then round columns in turn (Qronos)."""

    name: ClassVar[str] = "qronos"
    version: ClassVar[int] = 1
    calibration: ClassVar[Calibration] = Calibration.BOTH_STREAMS
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    remarks: ClassVar[Mapping[str, str]] = {}

    damp: float = 1e-6
    damp_increment: float = 1e-4

    def _factorize(self, gram_CC: Tensor, order_C: Tensor, names: list[str]) -> Hessian:
        return factorize(
            gram_CC,
            order_C,
            names,
            damp=self.damp,
            damp_increment=self.damp_increment,
            relative_to=_largest_eigenvalue,
        )

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


def _largest_eigenvalue(gram_CC: Tensor) -> Tensor:
    vector_C = gram_CC.diagonal() / gram_CC.diagonal().norm()
    value: Tensor = vector_C.norm()
    for _ in range(POWER_STEPS):
        vector_C = gram_CC @ vector_C
        value = vector_C.norm()
        vector_C = vector_C / value
    return value
