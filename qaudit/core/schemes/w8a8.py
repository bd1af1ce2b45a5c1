"""Eight bits for weights and activations: FP8, INT8, and SmoothQuant in front of INT8.

`fp8` has 8-bit floats, without calibration: one float32 scale per row of a weight and one per token
of the activations, computed as the token arrives: what llm-compressor and vLLM call `FP8_DYNAMIC`.
With `blocks` one per square of 128 x 128 weights, and one per token and 128 columns: `FP8_BLOCK`,
the format of DeepSeek's releases. With `scale_dtype=bf16` the scales of weights are rounded before
the codes are chosen: transformers reads them in the dtype of the model, vLLM in float32.

Given up: the accumulation of any particular kernel. Rounded activations are multiplied in the
dtype of the model, in which a code times its scale is rounded once more; in float32 it is exact
to the last bit of the product.

`int8` has one symmetric scale per row of a weight, and one per token of the activations, computed
as the token arrives: llm-compressor's `W8A8`, without calibration. With `scale_dtype=bf16` the
scales of weights are rounded before the codes are chosen: transformers reads them in the dtype of
the model, vLLM in float32.

`smoothquant` (Xiao et al., "SmoothQuant", 2211.10438) first moves what is large in a column of the
activations into the weights: s_j = max|x_j|^alpha / max|w_j|^(1 - alpha) over the linears that
read the column, W diag(s), and 1/s into the weight of the norm before. As published, only linears
behind a norm are smoothed: q/k/v and gate/up; others are rounded as by `int8`. Its alpha is 0.5;
the authors take 0.8 for Llama. A post-norm model (OLMo 2) has no norm that could take the scales,
and is refused.

Given up: the rounding of the norm's weight, divided by s, to its own dtype. With `exact_fold` there
is none: scales are rounded to powers of two, so that a file can hold the norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.floats import SQUARE, Float8Codes, fp8_token_groups, fp8_tokens, int8_tokens
from qaudit.core.grid import group_notes, powers_of_two, quantize_groups
from qaudit.core.linears import (
    CodeLayout,
    IntegerCodes,
    Linears,
    Quantized,
    largest_inputs,
    refuse_nonfinite,
    store_each,
)
from qaudit.core.scheme import Calibration, Scheme
from qaudit.errors import SourceError
from qaudit.support.lazy import Tensor, torch

INTEGERS = CodeLayout("integers", rounds_inputs=True)
SMALLEST = 1e-5  # of a column's largest magnitudes, as in the published code


class _EightBits(Scheme):
    """What all have in common."""

    code_bits: ClassVar[int | None] = 8
    act_bits: ClassVar[int | None] = 8


@dataclass(frozen=True, kw_only=True)
class Float8(_EightBits):
    """Round weights and activations to 8-bit floats (FP8, e4m3); no calibration."""

    name: ClassVar[str] = "fp8"

    blocks: bool = False
    scale_dtype: str = "float32"

    @property
    def layout(self) -> CodeLayout:
        return CodeLayout("float8", rounds_inputs=True, squares=self.blocks)

    def quantize(self, linears: Linears) -> Quantized:
        def store(weight_RC: Tensor) -> Float8Codes:
            return Float8Codes.of(
                weight_RC.float(), squares=self.blocks, scale_dtype=self.scale_dtype
            )

        refuse_nonfinite(linears)
        notes = group_notes(linears.columns, SQUARE) if self.blocks else ()
        inputs = fp8_token_groups if self.blocks else fp8_tokens
        return store_each(linears, store, notes, inputs=inputs)


@dataclass(frozen=True, kw_only=True)
class Integer8(_EightBits):
    """Round weights by row and activations by token to 8-bit integers (W8A8)."""

    name: ClassVar[str] = "int8"
    layout: ClassVar[CodeLayout] = INTEGERS

    scale_dtype: str = "float32"

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        return _rounded(linears, self.scale_dtype)


@dataclass(frozen=True, kw_only=True)
class SmoothQuant(_EightBits):
    """Move large activations into the weights behind norms, then round both to 8 bits."""

    name: ClassVar[str] = "smoothquant"
    layout: ClassVar[CodeLayout] = INTEGERS
    calibration: ClassVar[Calibration] = Calibration.FULL_PRECISION
    any_model: ClassVar[bool] = False

    alpha: float = 0.5
    exact_fold: bool = False
    scale_dtype: str = "float32"

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        largest_C = largest_inputs(linears, self.name)
        if not linears.block_has_norm_folds:
            raise SourceError(
                f"no norm of block {linears.block} can take the scales of `smoothquant`: "
                f"{linears.names} and the others read no norm's output alone, as in post-norm "
                "models",
                hint="use `int8`, which rounds the same way without scales",
            )
        if not linears.fold_is_norm:
            return _rounded(linears, self.scale_dtype)
        scale_C = smoothing_scales(linears, largest_C, self.alpha)
        if self.exact_fold:
            scale_C = powers_of_two(scale_C)
        return _rounded(linears, self.scale_dtype, scale_C)


def smoothing_scales(linears: Linears, largest_C: Tensor, alpha: float) -> Tensor:
    """Return SmoothQuant's scale of each column; 1 where no input reached one."""
    weights = [weight_RC.detach().float() for weight_RC in linears.weights.values()]
    weight_C = (
        torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).clamp_(min=SMALLEST)
    )
    input_C = largest_C.to(weight_C.device)
    scale_C = (input_C.pow(alpha) / weight_C.pow(1 - alpha)).clamp_(min=SMALLEST)
    return torch.where(input_C > 0, scale_C, 1.0)


def _rounded(linears: Linears, scale_dtype: str, scale_C: Tensor | None = None) -> Quantized:
    def store(weight_RC: Tensor) -> IntegerCodes:
        scaled_RC = weight_RC if scale_C is None else weight_RC * scale_C
        return quantize_groups(scaled_RC, 8, -1, symmetric=True, scale_dtype=scale_dtype)

    def inputs(x: Tensor) -> Tensor:
        if scale_C is None:
            return int8_tokens(x)
        # What follows the norm is x / s; the weights here are those for x.
        return (int8_tokens(x.float() / scale_C) * scale_C).to(x.dtype)

    return store_each(linears, store, column_scale_C=scale_C, inputs=inputs)
