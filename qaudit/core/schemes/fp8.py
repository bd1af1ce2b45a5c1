"""FP8: 8-bit floats for weights and activations, without calibration.

One float32 scale per row of a weight and one per token of the activations, computed as the token
arrives: what llm-compressor and vLLM call `FP8_DYNAMIC`. With `blocks` one per square of 128 x 128
weights, and one per token and 128 columns: `FP8_BLOCK`, the format of DeepSeek's releases. With
`scale_dtype=bf16` the scales of weights are rounded before the codes are chosen: transformers
reads them in the dtype of the model, vLLM in float32.

Given up: the accumulation of any particular kernel. Rounded activations are multiplied in the
dtype of the model, in which a code times its scale is rounded once more; in float32 it is exact
to the last bit of the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.activations import fp8_token_groups, fp8_tokens
from qaudit.core.floats import SQUARE, Float8Codes
from qaudit.core.grid import group_notes
from qaudit.core.linears import CodeLayout, Linears, Quantized, decoded, refuse_nonfinite
from qaudit.core.scheme import Scheme


@dataclass(frozen=True, kw_only=True)
class Float8(Scheme):
    """Round weights and activations to 8-bit floats (FP8, e4m3); no calibration."""

    name: ClassVar[str] = "fp8"
    code_bits: ClassVar[int | None] = 8
    act_bits: ClassVar[int | None] = 8

    blocks: bool = False
    scale_dtype: str = "float32"

    @property
    def layout(self) -> CodeLayout:
        return CodeLayout("float8", rounds_inputs=True, squares=self.blocks)

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        stored = {
            name: Float8Codes.of(
                weight_RC.detach().float(), squares=self.blocks, scale_dtype=self.scale_dtype
            )
            for name, weight_RC in linears.weights.items()
        }
        columns = next(iter(linears.weights.values())).shape[1]
        notes = group_notes(columns, SQUARE) if self.blocks else ()
        inputs = fp8_token_groups if self.blocks else fp8_tokens
        return decoded(linears, stored, notes, inputs=inputs)
