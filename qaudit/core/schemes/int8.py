"""INT8 for weights and activations (W8A8), and SmoothQuant in front of it.

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

from dataclasses import dataclass, replace
from typing import ClassVar

from qaudit.core.activations import int8_tokens
from qaudit.core.grid import powers_of_two, quantize_groups
from qaudit.core.linears import (
    CodeLayout,
    Linears,
    Quantized,
    decoded,
    largest_inputs,
    refuse_nonfinite,
)
from qaudit.core.scheme import Calibration, Scheme
from qaudit.errors import SourceError
from qaudit.support.lazy import Tensor, torch

SMALLEST = 1e-5  # of a column's largest magnitudes, as in the published code


@dataclass(frozen=True, kw_only=True)
class Integer8(Scheme):
    """Round weights by row and activations by token to 8-bit integers (W8A8)."""

    name: ClassVar[str] = "int8"
    code_bits: ClassVar[int | None] = 8
    act_bits: ClassVar[int | None] = 8

    scale_dtype: str = "float32"

    @property
    def layout(self) -> CodeLayout:
        return CodeLayout("integers", rounds_inputs=True)

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        return _rounded(linears, self.scale_dtype)


@dataclass(frozen=True, kw_only=True)
class SmoothQuant(Scheme):
    """Move large activations into the weights behind norms, then round both to 8 bits."""

    name: ClassVar[str] = "smoothquant"
    code_bits: ClassVar[int | None] = 8
    act_bits: ClassVar[int | None] = 8
    calibration: ClassVar[Calibration] = Calibration.FULL_PRECISION
    any_model: ClassVar[bool] = False

    alpha: float = 0.5
    exact_fold: bool = False
    scale_dtype: str = "float32"

    @property
    def layout(self) -> CodeLayout:
        return CodeLayout("integers", rounds_inputs=True)

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        largest_C = largest_inputs(linears, self.name)
        if not linears.block_has_norm_folds:
            names = ", ".join(f"`{name}`" for name in linears.weights)
            raise SourceError(
                f"no norm of block {linears.block} can take the scales of `smoothquant`: {names} "
                "and the others read no norm's output alone, as in post-norm models",
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
    stored = {}
    for name, weight_RC in linears.widened():
        scaled_RC = weight_RC if scale_C is None else weight_RC * scale_C
        stored[name] = quantize_groups(scaled_RC, 8, -1, symmetric=True, scale_dtype=scale_dtype)
    if scale_C is None:
        return decoded(linears, stored, inputs=int8_tokens)

    def inputs(x: Tensor) -> Tensor:
        # What follows the norm is x / s; the weights here are those for x.
        return (int8_tokens(x.float() / scale_C) * scale_C).to(x.dtype)

    return replace(decoded(linears, stored, column_scale_C=scale_C), inputs=inputs)
