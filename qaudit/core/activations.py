"""Rounding of activations: 8-bit integers, and the floats of `qaudit/core/floats.py`.

Every scale is of one token, or of a group of its columns, and computed as the token arrives. All
steps work in place on a float32 copy.

Shapes: N tokens, C columns, G groups of columns, K columns of one group.
"""

from __future__ import annotations

from collections.abc import Callable

from qaudit.core.floats import (
    MX_GROUP,
    NV_GROUP,
    SQUARE,
    fp8_scale,
    largest_magnitude,
    mx_scale,
    nv_scale,
    round_e2m1_,
    round_e4m3_,
)
from qaudit.core.grid import fit_range
from qaudit.support.lazy import Tensor, torch

_CORE_ELEMENTS = 2**17  # half a megabyte in float32


def int8_tokens(x: Tensor) -> Tensor:
    """Round to 8-bit integers with one symmetric scale per token."""
    return _as_given(x, _round_int8_)


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


def _round_int8_(x: Tensor) -> Tensor:
    largest = largest_magnitude(x)
    scale = fit_range(-largest, largest, 8, symmetric=True, scale_dtype="float32").scale
    return x.div_(scale).round_().clamp_(-128, 127).mul_(scale)
