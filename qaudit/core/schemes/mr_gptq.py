"""MR-GPTQ: GPTQ onto 4-bit floats, behind a rotation of small blocks.

Egiazarian et al., "Bridging the Gap Between Promise and Performance for Microscaling FP4
Quantization" (2509.23202), with the choices of the authors' code (FP-Quant):

- inputs and weights are rotated by a Walsh-Hadamard matrix in blocks of 128 columns (`block`);
- scales of all groups are fixed first, on the rotated weights, searched for the least sum of
  |error|^2.4;
- GPTQ walks columns by falling diagonal of the Hessian of rotated inputs (static activation order:
  groups stay where they are), damped by 0.01 of its mean;
- `format` is `nvfp4` (groups of 16) or `mxfp4` (groups of 32); linears that read one input share
  NVFP4's scale of the tensor; activations are rounded after the rotation, `act=16` leaves them.

Different: each candidate scale is rounded to the format before its error is taken, and after it in
FP-Quant; a power of two may be the next larger one. Columns behind the last full block are rotated
by themselves, where FP-Quant refuses such a width. NVFP4's scale of activations is fixed by
calibration: no value of a rotated block is larger than the norm of the largest magnitudes in it.

Shapes: R rows, C columns, G groups. Weights are transposed in the solver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qaudit.core.activations import mxfp4_groups, nvfp4_groups
from qaudit.core.floats import (
    E2M1_LARGEST,
    E8M0_BIAS,
    MX_GROUP,
    NV_GROUP,
    MxFloat4Codes,
    NvFloat4Codes,
    e2m1_codes,
    e4m3,
    mx_scale,
    nv_scale,
    round_e2m1_,
    tensor_scale,
)
from qaudit.core.gptq_solver import Walk, column_order, factorize, solve
from qaudit.core.grid import group_notes
from qaudit.core.linears import (
    Linears,
    Quantized,
    StoredWeight,
    decoded,
    largest_inputs,
    refuse_nonfinite,
    required_inputs,
)
from qaudit.core.rotation import rotate_blocks
from qaudit.core.scheme import Calibration, Scheme
from qaudit.core.schemes.quarot import UNROUNDED
from qaudit.errors import SchemeError
from qaudit.support.lazy import Tensor, torch

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
        return FloatGrid(torch.cat([grid.scale for grid in grids]))

    def roundings(self) -> list[Callable[[Tensor], None]]:
        return [partial(_round_column, scale_R) for scale_R in self.scale.unbind()]

    def codes_of_points(self, point: Tensor) -> Tensor:
        return e2m1_codes(point / self.scale)


def fit_nv(weight_KR: Tensor, tensor_scale: Tensor) -> FloatGrid:
    usual = nv_scale(weight_KR.abs().amax(0, keepdim=True), tensor_scale)
    codes = e4m3(usual).view(torch.uint8)
    lower = (codes.int() - step for step in range(NV_STEPS))
    scales = (
        code.clamp(min=1).to(torch.uint8).view(torch.float8_e4m3fn).float() / tensor_scale
        for code in lower
    )
    return _best(weight_KR, scales)


def fit_mx(weight_KR: Tensor) -> FloatGrid:
    usual = mx_scale(weight_KR.abs().amax(0, keepdim=True), "floor")
    return _best(weight_KR, ((usual * 2.0**step).clamp_(2.0**-126, 2.0**127) for step in MX_STEPS))


def _best(weight_KR: Tensor, scales: Iterable[Tensor]) -> FloatGrid:
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


GROUPS = {"nvfp4": NV_GROUP, "mxfp4": MX_GROUP}
E8M0_NAN = 255


@dataclass(frozen=True, kw_only=True)
class MrGptq(Scheme):
    """Rotate blocks of columns, then round to 4-bit floats by GPTQ (MR-GPTQ)."""

    name: ClassVar[str] = "mr-gptq"
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM
    code_bits: ClassVar[int | None] = 4

    format: str = "nvfp4"
    act: int = 4
    block: int = 128
    damp: float = 0.01
    damp_increment: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in GROUPS:
            raise SchemeError(
                f"there is no format `{self.format}` of 4-bit floats",
                hint=f"use format={' or format='.join(GROUPS)}",
            )
        if self.act not in (4, UNROUNDED):
            raise SchemeError(
                f"activations of {self.act} bits do not exist in `{self.format}`",
                hint="use act=4, or act=16 to leave them as they are",
            )
        if self.block < 1:
            raise SchemeError(f"a block of {self.block} columns does not exist", hint="use 128")
        if not (0 < self.damp < 1 and 0 <= self.damp_increment < 1):
            raise SchemeError(
                f"a damp of {self.damp} raised by {self.damp_increment} is out of range",
                hint="use 0 < damp < 1 and 0 <= damp_increment < 1",
            )

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        gram_CC = required_inputs(linears, self.name).gram_CC
        turn = partial(rotate_blocks, size=self.block)
        originals = list(linears.weights.values())
        weight_CR = turn(
            torch.cat([weight.detach().float() for weight in originals])
        ).T.contiguous()
        gram_CC = turn(turn(gram_CC.to(weight_CR)).T.contiguous())
        gram_CC = (gram_CC + gram_CC.T) / 2
        scale = tensor_scale(weight_CR.abs().amax())
        diagonal_C = gram_CC.diagonal()
        order_C = column_order(diagonal_C, self._group, act_order=True, act_group_aware=False)
        hessian = factorize(
            gram_CC,
            order_C,
            list(linears.weights),
            damp=self.damp,
            damp_increment=self.damp_increment,
        )
        fit = fit_mx if self.format == "mxfp4" else partial(fit_nv, tensor_scale=scale)
        walk: Walk[FloatGrid] = Walk(group=self._group, fit=fit, static_groups=True)
        solution = solve(weight_CR, hessian, walk)
        counts = [len(weight) for weight in originals]
        parts = zip(
            solution.codes_CR.T.split(counts), solution.grid_GR.scale.T.split(counts), strict=True
        )
        input_scale = self._input_scale(linears)
        stored: Mapping[str, StoredWeight] = {
            name: self._stored(*part, scale, input_scale)
            for name, part in zip(linears.weights, parts, strict=True)
        }
        notes = (*group_notes(len(weight_CR), self._group), *hessian.notes)
        return decoded(linears, stored, notes, inputs=self._inputs(turn, input_scale))

    @property
    def _group(self) -> int:
        return GROUPS[self.format]

    def _stored(
        self, codes_RC: Tensor, scales_RG: Tensor, scale: Tensor, input_scale: Tensor | None
    ) -> StoredWeight:
        codes_RC = codes_RC.contiguous()
        if self.format == "nvfp4":
            return NvFloat4Codes(codes_RC, e4m3(scales_RG * scale), scale, input_scale)
        exponents_RG = torch.frexp(scales_RG).exponent - 1 + E8M0_BIAS
        exponents_RG = torch.where(torch.isfinite(scales_RG), exponents_RG, E8M0_NAN)
        return MxFloat4Codes(codes_RC, exponents_RG.to(torch.uint8))

    def _input_scale(self, linears: Linears) -> Tensor | None:
        if self.format == "mxfp4" or self.act == UNROUNDED:
            return None
        weight = next(iter(linears.weights.values()))
        blocks = largest_inputs(linears, self.name).to(weight.device).split(self.block)
        return tensor_scale(torch.stack([block.norm() for block in blocks]).amax())

    def _inputs(
        self, turn: Callable[[Tensor], Tensor], scale: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        if self.act == UNROUNDED:
            return turn
        if scale is not None:
            return lambda x: nvfp4_groups(turn(x.float()), scale).to(x.dtype)
        return lambda x: mxfp4_groups(turn(x.float()), "even").to(x.dtype)
