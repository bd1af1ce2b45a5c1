"""MR-GPTQ: GPTQ onto 4-bit floats, behind a rotation of small blocks.

Egiazarian et al., "Bridging the Gap Between Promise and Performance for Microscaling FP4
Quantization" (2509.23202), with the choices of the authors' code (FP-Quant):

- inputs and weights are rotated by a Walsh-Hadamard matrix in blocks of 128 columns (`block`);
- scales of all groups are fixed first, on the rotated weights, searched for the least sum of
  |error|^2.4 (`qaudit/core/float_grid.py`);
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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from qaudit.core.activations import mxfp4_groups, nvfp4_groups
from qaudit.core.float_grid import FloatGrid, fit_mx, fit_nv
from qaudit.core.floats import (
    E8M0_BIAS,
    MX_GROUP,
    NV_GROUP,
    MxFloat4Codes,
    NvFloat4Codes,
    e4m3,
    tensor_scale,
)
from qaudit.core.gptq_solver import Walk, column_order, factorize, solve
from qaudit.core.grid import group_notes
from qaudit.core.linears import (
    Linears,
    Quantized,
    decoded,
    largest_inputs,
    refuse_nonfinite,
    required_inputs,
)
from qaudit.core.rotation import rotate_blocks
from qaudit.core.scheme import Calibration, Scheme
from qaudit.core.schemes.quarot import UNROUNDED
from qaudit.errors import SchemeError

if TYPE_CHECKING:
    from torch import Tensor

    from qaudit.core.stored import StoredWeight

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
        import torch

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
        import torch

        codes_RC = codes_RC.contiguous()
        if self.format == "nvfp4":
            return NvFloat4Codes(codes_RC, e4m3(scales_RG * scale), scale, input_scale)
        exponents_RG = torch.frexp(scales_RG).exponent - 1 + E8M0_BIAS
        exponents_RG = torch.where(torch.isfinite(scales_RG), exponents_RG, E8M0_NAN)
        return MxFloat4Codes(codes_RC, exponents_RG.to(torch.uint8))

    def _input_scale(self, linears: Linears) -> Tensor | None:
        import torch

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
