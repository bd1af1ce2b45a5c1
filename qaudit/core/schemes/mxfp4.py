"""MXFP4: 4-bit floats in groups of 32 under powers of two (OCP Microscaling), no calibration.

`mxfp4a16` rounds weights alone: gpt-oss and MXFP4 files of GGUF. `mxfp4` rounds activations too,
whose scales are computed as the tokens arrive.

Two rules for the power of two are in use, and they differ in about 5 % of the weights: `even`
(compressed-tensors, vLLM) and `floor` (OCP's specification, torchao, llama.cpp). `rotate` rotates
inputs and weights of every linear first (`qaudit/core/rotation.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qaudit.core.activations import mxfp4_groups
from qaudit.core.floats import MX_GROUP, MxFloat4Codes
from qaudit.core.grid import group_notes
from qaudit.core.linears import CodeLayout, Linears, Quantized, decoded, refuse_nonfinite
from qaudit.core.rotation import rotate, rotated
from qaudit.core.scheme import Scheme
from qaudit.errors import SchemeError
from qaudit.support.lazy import Tensor

RULES = ("even", "floor")


@dataclass(frozen=True, kw_only=True)
class MxFloat4Weights(Scheme):
    """Round weights to 4-bit floats under powers of two (MXFP4); no calibration."""

    name: ClassVar[str] = "mxfp4a16"
    code_bits: ClassVar[int | None] = 4

    rule: str = "even"
    rotate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in RULES:
            raise SchemeError(
                f"there is no rule `{self.rule}` for the scales of MXFP4",
                hint=f"use rule={' or rule='.join(RULES)}",
            )

    @property
    def transforms_inputs(self) -> bool:
        return self.rotate

    @property
    def layout(self) -> CodeLayout | None:
        rounds = self.act_bits is not None
        return None if self.rotate else CodeLayout("mx-float4", rounds_inputs=rounds)

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        turned = rotated(linears) if self.rotate else linears
        stored = {
            name: MxFloat4Codes.of(weight_RC.detach().float(), rule=self.rule)
            for name, weight_RC in turned.weights.items()
        }
        columns = next(iter(linears.weights.values())).shape[1]
        return decoded(linears, stored, group_notes(columns, MX_GROUP), inputs=self._inputs())

    def _inputs(self) -> Callable[[Tensor], Tensor] | None:
        """Return the change of the inputs; without rounding it is a rotation or none."""
        return rotate if self.rotate else None


@dataclass(frozen=True, kw_only=True)
class MxFloat4(MxFloat4Weights):
    """Round weights and activations to 4-bit floats under powers of two (MXFP4)."""

    name: ClassVar[str] = "mxfp4"
    act_bits: ClassVar[int | None] = 4

    def _inputs(self) -> Callable[[Tensor], Tensor] | None:
        if self.rotate:
            return lambda x: mxfp4_groups(rotate(x), self.rule)
        return partial(mxfp4_groups, rule=self.rule)
