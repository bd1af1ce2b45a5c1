"""Rounding of activations: 8-bit integers, and the floats of `qaudit/core/floats.py`.

Every scale is of one token, or of a group of its columns, and computed as the token arrives. All
steps work in place on a float32 copy.

Shapes: N tokens, C columns, G groups of columns, K columns of one group.

**Keys and values** rounded as a quantized cache would hold them.

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

from collections.abc import Callable

from qaudit.core.floats import (
    MX_GROUP,
    NV_GROUP,
    SQUARE,
    e4m3,
    fp8_scale,
    largest_magnitude,
    mx_scale,
    nv_scale,
    round_e2m1_,
    round_e4m3_,
)
from qaudit.core.grid import SMALLEST_SCALE, fit, fit_range, fit_share
from qaudit.core.rotation import rotate
from qaudit.core.scheme import CACHES, UNROUNDED
from qaudit.support.lazy import Tensor, torch

_CORE_ELEMENTS = 2**17  # half a megabyte in float32


def int8_tokens(x: Tensor) -> Tensor:
    """Round to 8-bit integers with one symmetric scale per token."""

    def round_(wide: Tensor) -> Tensor:
        largest = largest_magnitude(wide)
        scale = fit_range(-largest, largest, 8, symmetric=True, scale_dtype="float32").scale
        return wide.div_(scale).round_().clamp_(-128, 127).mul_(scale)

    return _as_given(x, round_)


def round_tokens(x: Tensor, bits: int, clip: float = 1.0) -> Tensor:
    """Round each token on a symmetric grid of integers, the largest cut to a share of itself."""
    return x if bits == UNROUNDED else fit_share(x, bits, clip).snap(x)


def fp8_tokens(x: Tensor) -> Tensor:
    """Round to 8-bit floats with one scale per token."""
    return _as_given(x, _round_fp8_)


def fp8_token_groups(x: Tensor) -> Tensor:
    """Round to 8-bit floats with one scale per token and 128 columns."""
    return _as_given(x, lambda wide: by_group(wide, SQUARE, _round_fp8_))


def mxfp4_groups(x: Tensor, rule: str) -> Tensor:
    """Round to 4-bit floats in groups of 32 columns under powers of two."""

    def round_groups_(x_GK: Tensor) -> Tensor:
        scale_G1 = mx_scale(largest_magnitude(x_GK), rule)
        return round_e2m1_(x_GK.div_(scale_G1)).mul_(scale_G1)

    return _as_given(x, lambda wide: by_group(wide, MX_GROUP, round_groups_))


def nvfp4_groups(x: Tensor, scale: Tensor) -> Tensor:
    """Round to 4-bit floats in groups of 16 columns, under the scale of a tensor."""

    def round_groups_(x_GK: Tensor) -> Tensor:
        scale_G1 = nv_scale(largest_magnitude(x_GK), scale).div_(scale)
        return round_e2m1_(x_GK.div_(scale_G1)).mul_(scale_G1)

    return _as_given(x, lambda wide: by_group(wide, NV_GROUP, round_groups_))


def in_parts(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change activations some tokens at a time, where each token is changed by itself.

    What is computed of a large batch is faulted in anew at every step; a part stays in the cache
    of a core.
    """
    parts = -(-x.numel() // (_CORE_ELEMENTS * torch.get_num_threads()))
    if parts < 2 or x.device.type != "cpu":
        return change(x)
    x_NC = x.reshape(-1, x.shape[-1])
    changed_NC = torch.empty_like(x_NC)
    for part_NC, place_NC in zip(x_NC.chunk(parts), changed_NC.chunk(parts), strict=True):
        place_NC.copy_(change(part_NC))
    return changed_NC.reshape(x.shape)


def by_group(x: Tensor, size: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change full groups of columns at once, then the last one that is smaller."""
    columns = x.shape[-1]
    full = columns - columns % size
    parts = []
    if full:
        parts.append(change(x[..., :full].unflatten(-1, (-1, size))).flatten(-2))
    if full < columns:
        parts.append(change(x[..., full:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _as_given(x: Tensor, change_: Callable[[Tensor], Tensor]) -> Tensor:
    return change_(x.to(torch.float32, copy=True)).to(x.dtype)


def _round_fp8_(x: Tensor) -> Tensor:
    scale = fp8_scale(largest_magnitude(x))
    return round_e4m3_(x.div_(scale)).mul_(scale)


SCALE_BITS = 16


def round_heads(x: Tensor, kv: str, *, rotated: bool, clip: float = 1.0) -> Tensor:
    """Round keys or values; the last dimension is that of one head."""
    wide = rotate(x.float()) if rotated else x.float()
    if kv == "fp8":
        scale = fp8_scale(wide.abs().amax(-1, keepdim=True)).to(torch.bfloat16).float()
        scale = scale.clamp_(min=SMALLEST_SCALE)
        rounded = e4m3(wide / scale).float().mul_(scale)
    else:
        grid = fit(
            wide, CACHES[kv], symmetric=False, dim=-1, scale_dtype="bf16", shares=(clip, clip)
        )
        rounded = grid.snap(wide)
    return (rotate(rounded) if rotated else rounded).to(x.dtype)


def bits_per_value(kv: str, width: int) -> float:
    """Count the bits of a key or value with its share of the head's scale and zero point."""
    zero = 0 if kv == "fp8" else CACHES[kv]
    return CACHES[kv] + (SCALE_BITS + zero) / width
