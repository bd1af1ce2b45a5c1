"""NVFP4 and MXFP4: 4-bit floats in groups of columns, each under a scale of 8 bits.

`nvfp4a16` and `mxfp4a16` round weights alone and need no calibration. `nvfp4` and `mxfp4` round
activations too, whose groups get their scales as the tokens arrive.

NVFP4, of NVIDIA's GPUs, has groups of 16 under 8-bit floats, below one scale of the whole tensor.
That of activations is fixed beforehand, by the largest magnitude that a calibration token reached
in the full-precision model; both are presets of that name in compressed-tensors. The linears of a
group share the scale of their weights: vLLM reads q/k/v, and gate/up, as one matrix.

MXFP4 (OCP Microscaling), of gpt-oss and of GGUF files, has groups of 32 under powers of two. Two
rules for them are in use, and they differ in about 5 % of the weights: `even` (compressed-tensors,
vLLM) and `floor` (OCP's specification, torchao, llama.cpp).

`rotate` rotates inputs and weights of every linear first (`qaudit/core/rotation.py`). No rotated
value is larger than the norm of the largest magnitudes of all columns, from which NVFP4's scale of
rotated activations is taken: it clips nothing, and 8-bit floats below it are as precise.

**MR-GPTQ**: GPTQ onto 4-bit floats, behind a rotation of small blocks.

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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qaudit.core.floats import (
    E2M1_LARGEST,
    MX_GROUP,
    NV_GROUP,
    MxFloat4Codes,
    NvFloat4Codes,
    by_group,
    e2m1_codes,
    e4m3,
    exponents_of,
    mx_scale,
    mxfp4_groups,
    nv_scale,
    nvfp4_groups,
    round_e2m1_,
    tensor_scale,
)
from qaudit.core.gptq_solver import column_order, factorize, solve
from qaudit.core.grid import ColumnGrid, group_notes
from qaudit.core.linears import (
    CodeLayout,
    Codes,
    Linears,
    Quantized,
    StoredWeight,
    decoded,
    largest_inputs,
    refuse_nonfinite,
    required_inputs,
)
from qaudit.core.rotation import rotate, rotated
from qaudit.core.scheme import UNROUNDED, Calibration, Scheme, limited, one_of
from qaudit.support.lazy import Tensor, torch

RULES = ("even", "floor")
GROUPS = {"nvfp4": NV_GROUP, "mxfp4": MX_GROUP}

RoundGroups = Callable[[Tensor], Tensor]
"""Round activations in groups of columns."""
Rounded = tuple[Mapping[str, StoredWeight], RoundGroups]


class _Float4(Scheme):
    """What both formats have in common."""

    code_bits: ClassVar[int | None] = 4
    codes: ClassVar[Codes]
    columns: ClassVar[int]  # of a group

    rotate: bool

    @property
    def layout(self) -> CodeLayout | None:
        rounds = self.act_bits is not None
        return None if self.rotate else CodeLayout(self.codes, rounds_inputs=rounds)

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        turned = rotated(linears) if self.rotate else linears
        wide = {name: weight_RC.detach().float() for name, weight_RC in turned.weights.items()}
        stored, round_groups = self._rounded(wide, linears)
        inputs = None if self.act_bits is None else round_groups
        if self.rotate:
            inputs = rotate if inputs is None else lambda x: round_groups(rotate(x))
        return decoded(linears, stored, group_notes(linears.columns, self.columns), inputs=inputs)

    def _rounded(self, weights: Mapping[str, Tensor], linears: Linears) -> Rounded:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MxFloat4Weights(_Float4):
    """Round weights to 4-bit floats under powers of two (MXFP4); no calibration."""

    name: ClassVar[str] = "mxfp4a16"
    codes: ClassVar[Codes] = "mx-float4"
    columns: ClassVar[int] = MX_GROUP

    rule: str = limited(
        "even", one_of("rule", RULES, "there is no rule `{}` for the scales of MXFP4")
    )
    rotate: bool = False

    def _rounded(self, weights: Mapping[str, Tensor], linears: Linears) -> Rounded:
        stored = {name: MxFloat4Codes.of(w, rule=self.rule) for name, w in weights.items()}
        return stored, partial(mxfp4_groups, rule=self.rule)


@dataclass(frozen=True, kw_only=True)
class MxFloat4(MxFloat4Weights):
    """Round weights and activations to 4-bit floats under powers of two (MXFP4)."""

    name: ClassVar[str] = "mxfp4"
    act_bits: ClassVar[int | None] = 4


@dataclass(frozen=True, kw_only=True)
class NvFloat4Weights(_Float4):
    """Round weights to 4-bit floats under 8-bit scales (NVFP4); no calibration."""

    name: ClassVar[str] = "nvfp4a16"
    codes: ClassVar[Codes] = "nv-float4"
    columns: ClassVar[int] = NV_GROUP

    rotate: bool = False

    def _rounded(self, weights: Mapping[str, Tensor], linears: Linears) -> Rounded:
        scale = tensor_scale(torch.stack([w.abs().amax() for w in weights.values()]).amax())
        input_scale = None
        if self.act_bits is not None:
            largest_C = largest_inputs(linears, self.name).to(scale.device)
            input_scale = tensor_scale(largest_C.norm() if self.rotate else largest_C.amax())
        stored = {name: NvFloat4Codes.of(w, scale, input_scale) for name, w in weights.items()}
        return stored, partial(nvfp4_groups, scale=scale if input_scale is None else input_scale)


@dataclass(frozen=True, kw_only=True)
class NvFloat4(NvFloat4Weights):
    """Round weights and activations to 4-bit floats under 8-bit scales (NVFP4)."""

    name: ClassVar[str] = "nvfp4"
    act_bits: ClassVar[int | None] = 4
    calibration: ClassVar[Calibration] = Calibration.FULL_PRECISION


NORM = 2.4
NV_STEPS = 19
MX_STEPS = (0, 1, -1, -2)


@dataclass(frozen=True, eq=False)
class FloatGrid(ColumnGrid):
    """4-bit floats under float32 scales, (P, R)."""

    def roundings(self) -> list[Callable[[Tensor], None]]:
        return [partial(_round_column, scale_R) for scale_R in self.scale.unbind()]

    def codes_of_points(self, point: Tensor) -> Tensor:
        return e2m1_codes(point / self.scale)


def fit_nv(weight_KR: Tensor, tensor_scale: Tensor) -> FloatGrid:
    usual = nv_scale(weight_KR.abs().amax(0, keepdim=True), tensor_scale)
    codes = e4m3(usual).view(torch.uint8).int()
    lower = ((codes - step).clamp(min=1).to(torch.uint8) for step in range(NV_STEPS))
    scales = (code.view(torch.float8_e4m3fn).float() / tensor_scale for code in lower)
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


@dataclass(frozen=True, kw_only=True)
class MrGptq(Scheme):
    """Rotate blocks of columns, then round to 4-bit floats by GPTQ (MR-GPTQ)."""

    name: ClassVar[str] = "mr-gptq"
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM
    code_bits: ClassVar[int | None] = 4

    format: str = limited(
        "nvfp4", one_of("format", GROUPS, "there is no format `{}` of 4-bit floats")
    )
    act: int = limited(4, one_of("act", (4, UNROUNDED), "there are no 4-bit floats of {} bits"))
    block: int = limited(
        128, (lambda size: size >= 1, "a block of {} columns does not exist", "use 128")
    )
    damp: float = 0.01
    damp_increment: float = 0.01

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        turn = partial(by_group, size=self.block, change=rotate)
        gram_CC = required_inputs(linears, self.name).gram_CC
        weight_RC = torch.cat([weight.detach().float() for weight in linears.weights.values()])
        weight_CR = turn(weight_RC).T.contiguous()
        gram_CC = turn(turn(gram_CC.to(weight_CR)).T.contiguous())
        gram_CC = (gram_CC + gram_CC.T) / 2
        scale, input_scale = tensor_scale(weight_CR.abs().amax()), None
        is_nv, rounds = self.format == "nvfp4", self.act != UNROUNDED
        if is_nv and rounds:
            blocks = largest_inputs(linears, self.name).to(weight_CR.device).split(self.block)
            input_scale = tensor_scale(torch.stack([block.norm() for block in blocks]).amax())
        group = GROUPS[self.format]
        order_C = column_order(gram_CC.diagonal(), group, act_order=True, act_group_aware=False)
        hessian = factorize(gram_CC, order_C, linears.names, self.damp, self.damp_increment)
        lay = partial(fit_nv, tensor_scale=scale) if is_nv else fit_mx
        codes_CR, grid_GR, _ = solve(weight_CR, hessian, lay, group=group, static_groups=True)
        stored: dict[str, StoredWeight] = {}
        counts = [len(weight) for weight in linears.weights.values()]
        scale_GR = e4m3(grid_GR.scale * scale) if is_nv else exponents_of(grid_GR.scale)
        parts = (codes_CR.T.split(counts), scale_GR.T.split(counts))
        for name, *pair in zip(linears.weights, *parts, strict=True):
            codes_RC, scales_RG = (part.contiguous() for part in pair)
            if is_nv:
                stored[name] = NvFloat4Codes(codes_RC, scales_RG, scale, input_scale)
            else:
                stored[name] = MxFloat4Codes(codes_RC, scales_RG)
        round_groups: RoundGroups = partial(mxfp4_groups, rule="even")
        if input_scale is not None:
            round_groups = partial(nvfp4_groups, scale=input_scale)

        def inputs(x: Tensor) -> Tensor:
            return round_groups(turn(x.float())).to(x.dtype)

        notes = (*group_notes(len(weight_CR), group), *hessian.notes)
        return decoded(linears, stored, notes, inputs=inputs if rounds else turn)
