"""QuaRot: rotate inputs and weights so that nothing stands out, then round both to few bits.

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2404.00456). `quarot`
rounds weights by GPTQ, `quarot-rtn` to nearest; both round activations by token, symmetric, with
the largest magnitude of a token cut to 0.9 of itself, as published. `rotate=false` is the same
without rotations: what integers of four bits do by themselves. `act=16` leaves activations as they
are.

Simplified:
- every linear's input is rotated in front of it (`qaudit/core/rotation.py`), where QuaRot folds the
  rotations of the residual and of values into weights. Both round the same rotated inputs, but
  for a norm's weight, which QuaRot moves into the linears behind it. In exchange every architecture
  works, post-norm and tied embeddings too.
- weights are on the grid of `gptq` and `rtn` here, one scale a row, without QuaRot's search for
  clipped scales; GPTQ's statistics are of inputs that are rotated and not rounded.
- published numbers of W4A4KV4 have four-bit caches too: `quarot-4bit:kv=int4`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from qaudit.core.rotation import rotate, rotated
from qaudit.core.scheme import (
    Calibration,
    Linears,
    Quantized,
    Scheme,
    check_bits,
    check_group,
    refuse_nonfinite,
)
from qaudit.core.schemes.gptq import Gptq
from qaudit.core.schemes.rtn import RoundToNearest
from qaudit.errors import SchemeError

if TYPE_CHECKING:
    from torch import Tensor

UNROUNDED = 16


@dataclass(frozen=True, kw_only=True)
class QuarotNearest(Scheme):
    """Rotate, then round weights to nearest and activations by token."""

    name: ClassVar[str] = "quarot-rtn"

    bits: int
    act: int = 4
    group: int = -1
    clip: float = 0.9
    rotate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits)
        check_group(self.group)
        if self.act != UNROUNDED:
            check_bits(self.act)
        if not 0 < self.clip <= 1:
            raise SchemeError(f"a clip of {self.clip} is out of range", hint="use 0 < clip <= 1")

    @property
    def rotates_heads(self) -> bool:
        """Round keys behind R3 and values behind R2, as published."""
        return self.rotate

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        first = next(iter(linears.weights.values()))
        turned = rotated(linears) if self.rotate else linears
        quantized = self._rounding().quantize(turned)
        weights = {name: one.to(first.dtype) for name, one in quantized.weights.items()}
        inputs = self._inputs if self.rotate or self.act != UNROUNDED else None
        return replace(quantized, weights=weights, inputs=inputs)

    def _rounding(self) -> Scheme:
        return RoundToNearest(bits=self.bits, group=self.group)

    def _inputs(self, x: Tensor) -> Tensor:
        wide = rotate(x.float()) if self.rotate else x.float()
        return (wide if self.act == UNROUNDED else self._by_token(wide)).to(x.dtype)

    def _by_token(self, x: Tensor) -> Tensor:
        import torch

        top = 2 ** (self.act - 1) - 1
        scale = self.clip * x.abs().amax(-1, keepdim=True) / top
        scale = torch.where(scale == 0, 1.0, scale)
        return torch.div(x, scale).round_().clamp_(-top - 1, top).mul_(scale)


@dataclass(frozen=True, kw_only=True)
class Quarot(QuarotNearest):
    """Rotate, then round weights by GPTQ and activations by token (QuaRot)."""

    name: ClassVar[str] = "quarot"
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM

    damp: float = 0.01

    def _rounding(self) -> Scheme:
        return Gptq(bits=self.bits, group=self.group, damp=self.damp, act_group_aware=False)
