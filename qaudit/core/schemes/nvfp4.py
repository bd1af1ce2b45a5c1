"""NVFP4: 4-bit floats in groups of 16 under 8-bit scales, the 4-bit format of NVIDIA's GPUs.

`nvfp4a16` rounds weights alone and needs no calibration. `nvfp4` rounds activations too. The
scales of their groups are computed as the tokens arrive, below one scale of the whole tensor that
is fixed beforehand: by the largest magnitude that a calibration token reached in the
full-precision model. Both are presets of that name in compressed-tensors.

`rotate` rotates inputs and weights of every linear first (`qaudit/core/rotation.py`). No rotated
value is larger than the norm of the largest magnitudes of all columns, from which the scale of
rotated activations is taken: it clips nothing, and 8-bit floats below it are as precise.

The linears of a group share the scale of their weights: vLLM reads q/k/v, and gate/up, as one
matrix with one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qaudit.core.activations import nvfp4_groups
from qaudit.core.floats import NV_GROUP, NvFloat4Codes, tensor_scale
from qaudit.core.grid import group_notes
from qaudit.core.linears import (
    CodeLayout,
    Linears,
    Quantized,
    decoded,
    largest_inputs,
    refuse_nonfinite,
)
from qaudit.core.rotation import rotate, rotated
from qaudit.core.scheme import Calibration, Scheme
from qaudit.support.lazy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class NvFloat4Weights(Scheme):
    """Round weights to 4-bit floats under 8-bit scales (NVFP4); no calibration."""

    name: ClassVar[str] = "nvfp4a16"
    code_bits: ClassVar[int | None] = 4

    rotate: bool = False

    @property
    def transforms_inputs(self) -> bool:
        return self.rotate

    @property
    def layout(self) -> CodeLayout | None:
        rounds = self.act_bits is not None
        return None if self.rotate else CodeLayout("nv-float4", rounds_inputs=rounds)

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        turned = rotated(linears) if self.rotate else linears
        wide = {name: weight_RC.detach().float() for name, weight_RC in turned.weights.items()}
        scale = tensor_scale(torch.stack([weight.abs().amax() for weight in wide.values()]).amax())
        input_scale = self._input_scale(linears)
        stored = {
            name: NvFloat4Codes.of(weight_RC, scale, input_scale)
            for name, weight_RC in wide.items()
        }
        columns = next(iter(wide.values())).shape[1]
        inputs = self._inputs(input_scale)
        return decoded(linears, stored, group_notes(columns, NV_GROUP), inputs=inputs)

    def _inputs(self, scale: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        if scale is None:
            return rotate if self.rotate else None
        if self.rotate:
            return lambda x: nvfp4_groups(rotate(x), scale)
        return partial(nvfp4_groups, scale=scale)

    def _input_scale(self, linears: Linears) -> Tensor | None:
        """Return the scale of the activations; weights alone need none."""
        return None


@dataclass(frozen=True, kw_only=True)
class NvFloat4(NvFloat4Weights):
    """Round weights and activations to 4-bit floats under 8-bit scales (NVFP4)."""

    name: ClassVar[str] = "nvfp4"
    act_bits: ClassVar[int | None] = 4
    calibration: ClassVar[Calibration] = Calibration.FULL_PRECISION

    def _input_scale(self, linears: Linears) -> Tensor | None:
        weight = next(iter(linears.weights.values()))
        largest_C = largest_inputs(linears, self.name).to(weight.device)
        return tensor_scale(largest_C.norm() if self.rotate else largest_C.amax())
