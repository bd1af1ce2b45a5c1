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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qaudit.core.activations import mxfp4_groups, nvfp4_groups
from qaudit.core.floats import MX_GROUP, NV_GROUP, MxFloat4Codes, NvFloat4Codes, tensor_scale
from qaudit.core.grid import group_notes
from qaudit.core.linears import (
    CodeLayout,
    Codes,
    Linears,
    Quantized,
    StoredWeight,
    decoded,
    largest_inputs,
    refuse_nonfinite,
)
from qaudit.core.rotation import rotate, rotated
from qaudit.core.scheme import Calibration, Scheme
from qaudit.errors import SchemeError
from qaudit.support.lazy import Tensor, torch

RULES = ("even", "floor")

RoundGroups = Callable[[Tensor], Tensor]
"""Round activations in groups of columns."""


class _Float4(Scheme):
    """What both formats have in common."""

    code_bits: ClassVar[int | None] = 4
    codes: ClassVar[Codes]
    columns: ClassVar[int]  # of a group

    rotate: bool

    @property
    def transforms_inputs(self) -> bool:
        return self.rotate

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

    def _rounded(
        self, weights: Mapping[str, Tensor], linears: Linears
    ) -> tuple[Mapping[str, StoredWeight], RoundGroups]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MxFloat4Weights(_Float4):
    """Round weights to 4-bit floats under powers of two (MXFP4); no calibration."""

    name: ClassVar[str] = "mxfp4a16"
    codes: ClassVar[Codes] = "mx-float4"
    columns: ClassVar[int] = MX_GROUP

    rule: str = "even"
    rotate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in RULES:
            raise SchemeError(
                f"there is no rule `{self.rule}` for the scales of MXFP4",
                hint=f"use rule={' or rule='.join(RULES)}",
            )

    def _rounded(
        self, weights: Mapping[str, Tensor], linears: Linears
    ) -> tuple[Mapping[str, StoredWeight], RoundGroups]:
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

    def _rounded(
        self, weights: Mapping[str, Tensor], linears: Linears
    ) -> tuple[Mapping[str, StoredWeight], RoundGroups]:
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
