"""Keys and values rounded as a quantized cache would hold them.

A server keeps the key, behind the rotary embedding, and the value of every token, and `kv` is the
type it keeps them in. Each head of each token is a group with a scale of its own, in bfloat16:

    int8, int4   asymmetric: scale = (max - min) / (2^b - 1), zero = round(-min / scale), the range
                 always including 0, as QuaRot and KIVI hold values
    fp8          e4m3, symmetric: scale = largest / 448

Queries are not rounded. Every token reads rounded keys and values, its own too; a server that
keeps the latest tokens as they are (KIVI) loses less. vLLM's `fp8` has one scale for a whole layer.

A scheme that rotates rounds both in a rotated basis, R of a head's width: q k^T = (qR) (kR)^T, so
that a key that is rotated, rounded and rotated back gives the scores of QuaRot's online R3, and a
value the output of its R2. Without rounding both leave the model what it is.
"""

from __future__ import annotations

from qaudit.core.floats import e4m3, fp8_scale
from qaudit.core.grid import SMALLEST_SCALE, fit_range
from qaudit.core.rotation import rotate
from qaudit.core.scheme import CACHES
from qaudit.support.lazy import Tensor, torch

SCALE_BITS = 16


def round_heads(x: Tensor, kv: str, *, rotated: bool, clip: float = 1.0) -> Tensor:
    """Round keys or values; the last dimension is that of one head."""
    wide = rotate(x.float()) if rotated else x.float()
    rounded = _float8(wide) if kv == "fp8" else _integers(wide, CACHES[kv], clip)
    return (rotate(rounded) if rotated else rounded).to(x.dtype)


def bits_per_value(kv: str, width: int) -> float:
    """Count the bits of a key or value with its share of the head's scale and zero point."""
    zero = 0 if kv == "fp8" else CACHES[kv]
    return CACHES[kv] + (SCALE_BITS + zero) / width


def _integers(x: Tensor, bits: int, clip: float) -> Tensor:
    smallest, largest = clip * x.amin(-1, keepdim=True), clip * x.amax(-1, keepdim=True)
    return fit_range(smallest, largest, bits, symmetric=False, scale_dtype="bf16").snap(x)


def _float8(x: Tensor) -> Tensor:
    scale = fp8_scale(x.abs().amax(-1, keepdim=True)).to(torch.bfloat16).float()
    scale = scale.clamp_(min=SMALLEST_SCALE)
    return e4m3(x / scale).float().mul_(scale)
