"""Grids of 4-bit floats for a solver that rounds column by column, with scales that are searched.

A scale is one that the format holds, and the one below or above the usual scale that leaves
the least sum of |error|^2.4 over its group: 19 codes of e4m3 downwards, a factor of 5, for NVFP4,
and four powers of two for MXFP4.

Shapes: P grids, R rows, K columns of one group. Weights are transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from qaudit.core.floats import E2M1_LARGEST, e2m1_codes, e4m3, mx_scale, nv_scale, round_e2m1_

if TYPE_CHECKING:
    from torch import Tensor

NORM = 2.4
NV_STEPS = 19
MX_STEPS = (0, 1, -1, -2)


@dataclass(frozen=True, eq=False)
class FloatGrid:
    """4-bit floats under float32 scales, (P, R)."""

    scale: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> FloatGrid:
        return FloatGrid(change(self.scale))

    def joined(self, grids: Sequence[FloatGrid]) -> FloatGrid:
        import torch

        return FloatGrid(torch.cat([grid.scale for grid in grids]))

    def roundings(self) -> list[Callable[[Tensor], None]]:
        return [partial(_round_column, scale_R) for scale_R in self.scale.unbind()]

    def codes_of_points(self, point: Tensor) -> Tensor:
        return e2m1_codes(point / self.scale)


def fit_nv(weight_KR: Tensor, tensor_scale: Tensor) -> FloatGrid:
    import torch

    usual = nv_scale(weight_KR.abs().amax(0, keepdim=True), tensor_scale)
    codes = e4m3(usual).view(torch.uint8)
    lower = (codes.int() - step for step in range(NV_STEPS))
    scales = (
        code.clamp(min=1).to(torch.uint8).view(torch.float8_e4m3fn).float() / tensor_scale
        for code in lower
    )
    return _best(weight_KR, scales)


def fit_mx(weight_KR: Tensor) -> FloatGrid:
    """Search the power of two of each row of a group."""
    usual = mx_scale(weight_KR.abs().amax(0, keepdim=True), "floor")
    return _best(weight_KR, ((usual * 2.0**step).clamp_(2.0**-126, 2.0**127) for step in MX_STEPS))


def _best(weight_KR: Tensor, scales: Iterable[Tensor]) -> FloatGrid:
    import torch

    largest = weight_KR.abs().amax(0, keepdim=True) / E2M1_LARGEST
    unit = torch.where(largest == 0, 1.0, largest)  # so that powers neither vanish nor overflow
    best_1R, lowest_1R = unit, torch.full_like(unit, float("inf"))
    for scale_1R in scales:
        error_KR = (round_e2m1_(weight_KR / scale_1R).mul_(scale_1R) - weight_KR).abs_().div_(unit)
        loss_1R = error_KR.pow_(NORM).sum(0, keepdim=True)
        better_1R = loss_1R < lowest_1R
        best_1R = torch.where(better_1R, scale_1R, best_1R)
        lowest_1R = torch.where(better_1R, loss_1R, lowest_1R)
    return FloatGrid(best_1R)


def _round_column(scale_R: Tensor, target_R: Tensor) -> None:
    target_R.copy_(round_e2m1_(target_R / scale_R).mul_(scale_R))
