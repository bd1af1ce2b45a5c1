"""What a repository does to activations, as its runtime does it; or a note that it is left out.

A rounding is known by the configuration alone: by token, or by groups of a token, it needs nothing
else; under a fixed scale it takes the one that is stored beside the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qaudit.support.lazy import Tensor, torch

Kind = Literal[
    "fp8", "fp8 by 128", "fp8 fixed", "int8", "int8 fixed", "int8 but outliers", "nvfp4", "mxfp4"
]
_FIXED: Mapping[str, tuple[str, ...]] = {
    "fp8 fixed": (".input_scale", ".activation_scale"),
    "int8 fixed": (".input_scale",),
    "nvfp4": (".input_global_scale",),
}
STORED = tuple(dict.fromkeys(suffix for suffixes in _FIXED.values() for suffix in suffixes))
"""Suffixes of scales of activations."""


@dataclass(frozen=True)
class Rounding:
    """How what a linear reads is rounded; the number is a scale, a bound or a threshold."""

    kind: Kind
    number: float | None = None

    @property
    def bits(self) -> int | None:
        """Return the bits of each activation; None where some keep all of theirs."""
        if self.kind == "int8 but outliers":
            return None
        return 4 if self.kind.endswith("fp4") else 8

    @property
    def stored_scales(self) -> tuple[str, ...]:
        """Return suffixes of the fixed scale, one of which is stored beside the weight."""
        return _FIXED.get(self.kind, ())

    def __call__(self, x: Tensor) -> Tensor:
        from qaudit.core.activations import in_parts

        whole_batch = self.kind == "int8 but outliers"  # of any token of a batch
        return self._round(x) if whole_batch else in_parts(x, self._round)

    def _round(self, x: Tensor) -> Tensor:
        from qaudit.core import activations, floats

        number = self.number or 0.0
        match self.kind:
            case "fp8":
                bounded = x if self.number is None else x.clamp(-number, number)
                return activations.fp8_tokens(bounded)
            case "fp8 by 128":
                return activations.fp8_token_groups(x)
            case "int8":
                return activations.int8_tokens(x)
            case "mxfp4":
                return activations.mxfp4_groups(x, "even")
            case "nvfp4":
                return activations.nvfp4_groups(x, x.new_tensor(number, dtype=torch.float32))
            case "fp8 fixed":
                return (floats.e4m3(x.float() / number).float() * number).to(x.dtype)
            case "int8 fixed":
                return ((x.float() / number).round().clamp(-128, 127) * number).to(x.dtype)
            case "int8 but outliers":
                return _but_outliers(x, number)


def _but_outliers(x: Tensor, threshold: float) -> Tensor:
    """Round tokens to 8 bits but for columns with a value from a threshold on (LLM.int8)."""
    wide = x.float()
    large = wide.abs() >= threshold if threshold else wide.abs() < 0
    rest = wide.masked_fill(large, 0)
    scale = (rest.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    whole_C = large.flatten(0, -2).any(0)
    return (rest / scale).round().mul(scale).where(~whole_C, wide).to(x.dtype)
