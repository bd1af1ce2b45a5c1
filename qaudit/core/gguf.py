"""What a GGUF file holds of a matrix: blocks of codes under scales, and their weights.

| type | columns | of a block, in order | weight |
|---|---|---|---|
| Q8_0 | 32 | d, 32 codes | d q |
| Q4_0 | 32 | d, codes k and k + 16 in one byte | d (q - 8) |
| Q5_0 | 32 | d, fifth bits, four bits as Q4_0 | d (q - 16) |
| Q5_1 | 32 | d, m, fifth bits, four bits | d q + m |
| Q3_K | 256 | third bits, two bits, scales s of 6 bits for 16 columns, d | d (s - 32) (q - 4) |
| Q4_K | 256 | d, e, scales s and t of 6 bits for 32 columns, four bits | d s q - e t |
| Q5_K | 256 | d, e, scales, fifth bits, four bits | d s q - e t |
| Q6_K | 256 | four bits, two bits, scales s of 8 bits for 16 columns, d | d s (q - 32) |

d, e and m are float16.

**The blocks** are those that ggml's quantizers make, with and without importance. Importance is the
mean square of each column's inputs, as `llama-imatrix` collects it. Without it ggml weighs by the
weights themselves and searches less.

**The searches** for scales and codes of llama.cpp's quantizers, in the order of their sums.

Each works on many groups at once: K values of a group are rows, M groups are columns. Sums are
taken value by value in float32, as C code does, so that bytes are equal where a compiler contracts
no products and sums (x86-64 builds of ggml).

Shapes: R rows, C columns, N blocks, J groups of a block, K columns of a block or values of a group,
M = N J groups, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qaudit.core.linears import StoredWeight
from qaudit.support.lazy import Tensor, torch

Parts = dict[str, Tensor]

WIDE = 256


@dataclass(frozen=True)
class BlockType:
    """A type of llama.cpp, and the bytes of each part of its blocks, in order."""

    columns: int
    bits: int  # of a code
    parts: tuple[tuple[str, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(count for _, count in self.parts)


_HALF = ("d", 2)
TYPES = {
    "Q8_0": BlockType(32, 8, (_HALF, ("codes", 32))),
    "Q4_0": BlockType(32, 4, (_HALF, ("low", 16))),
    "Q5_0": BlockType(32, 5, (_HALF, ("high", 4), ("low", 16))),
    "Q5_1": BlockType(32, 5, (_HALF, ("m", 2), ("high", 4), ("low", 16))),
    "Q3_K": BlockType(WIDE, 3, (("high", 32), ("low", 64), ("scales", 12), _HALF)),
    "Q4_K": BlockType(WIDE, 4, (_HALF, ("e", 2), ("scales", 12), ("low", 128))),
    "Q5_K": BlockType(WIDE, 5, (_HALF, ("e", 2), ("scales", 12), ("high", 32), ("low", 128))),
    "Q6_K": BlockType(WIDE, 6, (("low", 128), ("high", 64), ("scales", 16), _HALF)),
}


@dataclass(frozen=True, eq=False)
class GgufBlocks(StoredWeight):
    """Packed blocks of a matrix, row after row."""

    packed_RB: Tensor  # uint8
    kind: str  # a key of TYPES

    def decode(self) -> Tensor:
        kind = TYPES[self.kind]
        blocks_NB = self.packed_RB.reshape(-1, kind.nbytes)
        parts, start = {}, 0
        for name, count in kind.parts:
            parts[name] = blocks_NB[:, start : start + count].contiguous()
            start += count
        return _DECODERS[self.kind](parts).reshape(len(self.packed_RB), -1)

    @property
    def nbits(self) -> int:
        return 8 * self.packed_RB.numel()


def assembled(kind: str, parts: Parts) -> Tensor:
    return torch.cat([parts[name].reshape(len(parts["d"]), -1) for name, _ in TYPES[kind].parts], 1)


def half(values_N: Tensor) -> Tensor:
    """Return the bytes of float16 numbers, one a block."""
    return values_N.reshape(-1, 1).to(torch.float16).view(torch.uint8)


def widened(bytes_N2: Tensor) -> Tensor:
    return bytes_N2.view(torch.float16).float()


def interleave(codes_NK: Tensor, bits: int, width: int) -> Tensor:
    """Put codes of so many bits that are `width` columns apart into one byte."""
    count = 8 // bits
    codes_NCW: Tensor = codes_NK.unflatten(1, (-1, count, width))
    byte = codes_NCW[:, :, 0]
    for k in range(1, count):
        byte = byte | (codes_NCW[:, :, k] << (bits * k))
    return byte.flatten(1)


def separate(bytes_NB: Tensor, bits: int, width: int) -> Tensor:
    bytes_NW, mask = bytes_NB.unflatten(1, (-1, width)), (1 << bits) - 1
    every = [(bytes_NW >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(every, 2).flatten(1)


def _codes(parts: Parts) -> Tensor:
    low, high = (32, 32) if "e" in parts else (16, 1)
    codes_NK = separate(parts["low"], 4, low)
    return codes_NK | (separate(parts["high"], 1, high) << 4) if "high" in parts else codes_NK


def _q3_k_weights(parts: Parts) -> Tensor:
    scales_NB = parts["scales"]
    s_NJ = separate(scales_NB[:, :8], 4, 8) | (separate(scales_NB[:, 8:], 2, 4) << 4)
    codes_NK = separate(parts["low"], 2, 32) | (separate(parts["high"], 1, 32) << 2)
    return _scaled(widened(parts["d"]) * (s_NJ.float() - 32), codes_NK.float() - 4)


def _with_minima_weights(parts: Parts) -> Tensor:
    first_N4, second_N4, third_N4 = parts["scales"].chunk(3, 1)
    s_NJ = torch.cat([first_N4 & 63, (third_N4 & 15) | (first_N4 >> 6 << 4)], 1)
    t_NJ = torch.cat([second_N4 & 63, (third_N4 >> 4) | (second_N4 >> 6 << 4)], 1)
    s_NJ, t_NJ = widened(parts["d"]) * s_NJ.float(), widened(parts["e"]) * t_NJ.float()
    codes_NJK: Tensor = _codes(parts).float().unflatten(1, (8, 32))
    return (s_NJ[:, :, None] * codes_NJK - t_NJ[:, :, None]).flatten(1)


def _q6_k_weights(parts: Parts) -> Tensor:
    codes_NK = separate(parts["low"], 4, 64) | (separate(parts["high"], 2, 32) << 4)
    scale_NJ = widened(parts["d"]) * parts["scales"].view(torch.int8).float()
    return _scaled(scale_NJ, codes_NK.float() - 32)


def _scaled(scale_NJ: Tensor, codes_NK: Tensor) -> Tensor:
    codes_NJK: Tensor = codes_NK.unflatten(1, (16, 16))
    return (scale_NJ[:, :, None] * codes_NJK).flatten(1)


_DECODERS: dict[str, Callable[[Parts], Tensor]] = {
    "Q8_0": lambda parts: parts["codes"].view(torch.int8).float() * widened(parts["d"]),
    "Q4_0": lambda parts: (_codes(parts).float() - 8) * widened(parts["d"]),
    "Q5_0": lambda parts: (_codes(parts).float() - 16) * widened(parts["d"]),
    "Q5_1": lambda parts: _codes(parts).float() * widened(parts["d"]) + widened(parts["m"]),
    "Q3_K": _q3_k_weights,
    "Q4_K": _with_minima_weights,
    "Q5_K": _with_minima_weights,
    "Q6_K": _q6_k_weights,
}


_AT_ONCE = {"cpu": 1 << 19}
_ELSEWHERE = 1 << 25
"""Weights that are searched together: what fits a processor's cache, or fills a device."""

_WITHOUT = {"Q4_K": (-1.0, 0.1, 20), "Q5_K": (-0.5, 0.1, 15)}
_WITH = (-0.9, 0.05, 36)
"""First candidate, distance and number of further candidates, beside the number of steps."""


def pack(kind: str, weight_RC: Tensor, importance_C: Tensor | None = None) -> Tensor:
    """Return the blocks of a matrix whose columns the type's blocks divide, (R, bytes)."""
    make = {"Q8_0": _q8_0, "Q3_K": _q3_k, "Q4_K": _with_minima, "Q5_K": _with_minima, "Q6_K": _q6_k}
    rows = max(1, _AT_ONCE.get(weight_RC.device.type, _ELSEWHERE) // weight_RC.shape[1])
    parts = []
    for part_RC in weight_RC.split(rows):
        x, importance = part_RC.float(), None
        if importance_C is not None:
            importance = importance_C.float().expand_as(part_RC)
        if TYPES[kind].columns == WIDE:
            x = x.reshape(-1, WIDE)
            importance = None if importance is None else importance.reshape(-1, WIDE)
        parts.append(make.get(kind, _narrow)(kind, x, importance).reshape(len(part_RC), -1))
    return torch.cat(parts)


def _q8_0(kind: str, x_RC: Tensor, importance_RC: Tensor | None) -> Tensor:
    x_NK = x_RC.reshape(-1, 32)
    scale_N1 = over(x_NK.abs().amax(1, keepdim=True), 127.0)
    steps_NK = (x_NK * _inverse(scale_N1)).abs()
    floor_NK = steps_NK.floor()
    magnitude_NK = floor_NK + (2 * (steps_NK - floor_NK)).floor()
    codes_NK = torch.copysign(magnitude_NK, x_NK).to(torch.int8)
    return assembled(kind, {"d": half(scale_N1), "codes": codes_NK.view(torch.uint8)})


def _narrow(kind: str, x_RC: Tensor, importance_RC: Tensor | None) -> Tensor:
    """Q4_0, Q5_0 and Q5_1: a scale, and of the last a minimum, for 32 columns."""
    x_NK, middle, low = x_RC.reshape(-1, 32), 1 << (TYPES[kind].bits - 1), None
    if importance_RC is not None:
        # Weights depend on the mean square of a whole row.
        power_R = over(total((x_RC * x_RC).T.contiguous()), float(x_RC.shape[1]))
        weight_KM = _columns(importance_RC * root(power_R[:, None] + x_RC * x_RC), 32)
        if kind == "Q5_1":
            codes_KM, scale, offset_M = affine(_columns(x_RC, 32), weight_KM, 31, *_WITH)
            low = -offset_M
        else:
            codes_KM, scale = symmetric(_columns(x_RC, 32), middle, weight_KM)
        codes_NK = codes_KM.T
    elif kind == "Q5_1":
        low = x_NK.amin(1, keepdim=True)
        scale = over(x_NK.amax(1, keepdim=True) - low, 31.0)
        codes_NK = ((x_NK - low) * _inverse(scale) + 0.5).trunc()
    else:
        # The lowest point of the grid is the value of largest magnitude (Q4_0, Q5_0).
        scale = x_NK.gather(1, x_NK.abs().argmax(1, keepdim=True)) / -middle
        codes_NK = (x_NK * _inverse(scale) + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1)
    codes_NK = codes_NK.to(torch.uint8)
    parts = {
        "d": half(scale),
        "low": interleave(codes_NK & 15, 4, 16),
        "high": interleave(codes_NK >> 4, 1, 1),
    }
    return assembled(kind, parts if low is None else parts | {"m": half(low)})


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, over(1.0, scale))


def _q3_k(kind: str, x_NK: Tensor, importance_NK: Tensor | None) -> Tensor:
    x_KM = _columns(x_NK, 16)
    if importance_NK is None:
        # One value after another, weighted by squares (make_q3_quants).
        largest_M = x_KM.gather(0, x_KM.abs().argmax(0, keepdim=True))[0]
        first_KM = nearest(over(-4.0, largest_M) * x_KM).clamp_(-4, 3).float()
        first_KM, scale_M = _descend(x_KM, x_KM * x_KM, first_KM, (-4, 3), both=False)
        first_KM, scale_M = _without_zeros(first_KM + 4, scale_M, largest_M)
        scales_NJ = scale_M.reshape(len(x_NK), -1)
        largest_N = scales_NJ.gather(1, scales_NJ.abs().argmax(1, keepdim=True))[:, 0]
        inverse_N = over(-32.0, largest_N)
        s_NJ = nearest(inverse_N[:, None] * scales_NJ).clamp_(-32, 31) + 32
        d_N = over(1.0, inverse_N)
        d_N = torch.where(largest_N == 0, 0.0, d_N)
        s_NJ = torch.where(largest_N[:, None] == 0, 0, s_NJ)
    else:
        weight_KM = _weighted(x_NK, importance_NK, 16)
        first_KM, scale_M = symmetric(x_KM, 4, weight_KM)
        sums_JN = total(weight_KM).reshape(len(x_NK), -1).T.contiguous()
        s_JN, d_N = symmetric(scale_M.reshape(len(x_NK), -1).T.contiguous(), 32, sums_JN)
        s_NJ = s_JN.T.int()
    s_NJ = s_NJ.to(torch.uint8)
    d_NB = half(d_N)
    step_M = (widened(d_NB) * (s_NJ.float() - 32)).flatten()
    codes_NK = _rounded(x_KM, first_KM, step_M, -4, 3)
    parts = {
        "high": interleave(codes_NK >> 2, 1, 32),
        "low": interleave(codes_NK & 3, 2, 32),
        "scales": torch.cat([interleave(s_NJ & 15, 4, 8), interleave(s_NJ >> 4, 2, 4)], 1),
        "d": d_NB,
    }
    return assembled(kind, parts)


def _with_minima(kind: str, x_NK: Tensor, importance_NK: Tensor | None) -> Tensor:
    """Q4_K and Q5_K: a scale and a minimum for 32 columns, each 6 bits under a float16."""
    top = (1 << TYPES[kind].bits) - 1
    x_KM = _columns(x_NK, 32)
    if importance_NK is None:
        weight_KM = root(total(x_KM * x_KM) / 32) + x_KM.abs()
        search = _WITHOUT[kind]
    else:
        weight_KM = _weighted(x_NK, importance_NK, 32)
        search = _WITH
    first_KM, *values = affine(x_KM, weight_KM, top, *search)
    six = []
    for values_M in values:
        values_NJ = values_M.reshape(len(x_NK), -1)
        if importance_NK is None:
            largest_N = values_NJ.amax(1).clamp_(min=0) + 0.0  # no -0
            inverse_N = torch.where(largest_N > 0, over(63.0, largest_N), 0.0)
            codes_NJ = (nearest(inverse_N[:, None] * values_NJ) & 255).clamp_(max=63)
            six.append((codes_NJ.to(torch.uint8), half(over(largest_N, 63.0))))
        else:
            sums_JN = total(weight_KM).reshape(len(x_NK), -1).T.contiguous()
            level_JN, d_N = positive(values_NJ.T.contiguous(), 63, sums_JN)
            six.append((level_JN.T.to(torch.uint8), half(d_N)))
    (s_NJ, d_NB), (t_NJ, e_NB) = six
    step_M = (widened(d_NB) * s_NJ.float()).flatten()
    offset_M = (widened(e_NB) * t_NJ.float()).flatten()
    codes_NK = _rounded(x_KM + offset_M, first_KM, step_M, 0, top)
    six_NB = [
        s_NJ[:, :4] | (s_NJ[:, 4:] >> 4 << 6),
        t_NJ[:, :4] | (t_NJ[:, 4:] >> 4 << 6),
        (s_NJ[:, 4:] & 15) | (t_NJ[:, 4:] << 4),
    ]
    parts = {
        "d": d_NB,
        "e": e_NB,
        "scales": torch.cat(six_NB, 1),
        "high": interleave(codes_NK >> 4, 1, 32),
        "low": interleave(codes_NK & 15, 4, 32),
    }
    return assembled(kind, parts)


def _q6_k(kind: str, x_NK: Tensor, importance_NK: Tensor | None) -> Tensor:
    x_KM = _columns(x_NK, 16)
    weight_KM = None if importance_NK is None else _columns(importance_NK, 16)
    first_KM, scale_M = symmetric(x_KM, 32, weight_KM)
    scales_NJ = scale_M.reshape(len(x_NK), -1)
    largest_N = scales_NJ.gather(1, scales_NJ.abs().argmax(1, keepdim=True))[:, 0]
    zero_N1 = (largest_N.abs() < SMALLEST)[:, None]
    inverse_N = over(-128.0, largest_N)
    s_NJ = nearest(inverse_N[:, None] * scales_NJ).clamp_(max=127).to(torch.int8)
    d_NB = half(over(1.0, inverse_N))
    step_M = (widened(d_NB) * s_NJ.float()).flatten()
    codes_NK = _rounded(x_KM, first_KM, step_M, -32, 31)
    parts = {
        "low": interleave(codes_NK & 15, 4, 64),
        "high": interleave(codes_NK >> 4, 2, 32),
        "scales": s_NJ.view(torch.uint8),
        "d": d_NB,
    }
    return torch.where(zero_N1, 0, assembled(kind, parts))


def _weighted(x_NK: Tensor, importance_NK: Tensor, group: int) -> Tensor:
    """Return importance times the size of each weight, about twice the mean square of a block."""
    power_N = 2 * total((x_NK * x_NK).T.contiguous()) / WIDE
    return _columns(importance_NK * root(power_N[:, None] + x_NK * x_NK), group)


def _rounded(x_KM: Tensor, codes_KM: Tensor, step_M: Tensor, low: int, high: int) -> Tensor:
    """Round under the scales that are stored; codes of a scale of zero stay those of the search."""
    rounded_KM = nearest(x_KM / step_M).clamp_(low, high) - low
    return torch.where(step_M == 0, codes_KM.int(), rounded_KM).to(torch.uint8).T.reshape(-1, WIDE)


def _columns(values: Tensor, group: int) -> Tensor:
    return values.reshape(-1, group).T.contiguous()


SMALLEST = 1e-15
"""A group whose largest magnitude is below holds zeros."""

_DESCENTS = 5


Fit = tuple[Tensor, Tensor]
"""Codes (K, M) from 0 up, as float32, and the scales (M,) that turn them into values."""


def nearest(values: Tensor) -> Tensor:
    """Round to nearest, ties to even, and wrap around where ggml does: from 2^22."""
    return ((values + 12582912.0).view(torch.int32) & 0x7FFFFF) - 0x400000


def total(values_KM: Tensor) -> Tensor:
    """Sum values one after another, in float32."""
    total_M = values_KM[0] + 0.0
    for value_M in values_KM[1:]:
        total_M += value_M
    return total_M


def over(numerator: float | Tensor, denominator: float | Tensor) -> Tensor:
    """Divide; CUDA multiplies by the inverse of a number that is given as such."""
    like = torch.as_tensor(numerator if isinstance(numerator, torch.Tensor) else denominator)
    a, b = (
        value if isinstance(value, torch.Tensor) else torch.full_like(like, value)
        for value in (numerator, denominator)
    )
    return a / b


def root(values: Tensor) -> Tensor:
    """Return square roots, rounded to nearest; libraries behind torch round float32 otherwise."""
    return values.double().sqrt().float()


def symmetric(x_KM: Tensor, top: int, weight_KM: Tensor | None = None) -> Fit:
    """Fit codes about `top` by 19 scales around the one of the largest value (make_qx_quants)."""
    weight_KM = x_KM * x_KM if weight_KM is None else weight_KM
    product_KM = weight_KM * x_KM
    largest_M = x_KM.gather(0, x_KM.abs().argmax(0, keepdim=True))[0]
    best_KM, scale_M = torch.zeros_like(x_KM), torch.zeros_like(largest_M)
    best_M = torch.zeros_like(largest_M)
    for step in (0, *range(-9, 0), *range(1, 10)):
        inverse_M = over(-_sum(top, (0.1, step)), largest_M)
        codes_KM = nearest(inverse_M * x_KM).clamp_(-top, top - 1).float()
        lx_M, l2_M = total(product_KM * codes_KM), total(weight_KM * codes_KM * codes_KM)
        better_M = (l2_M > 0) & (lx_M * lx_M > best_M * l2_M)
        if step == 0:
            better_M = torch.ones_like(better_M)
        scale_M = torch.where(better_M, torch.where(l2_M == 0, 0.0, lx_M / l2_M), scale_M)
        best_M = torch.where(better_M, scale_M * lx_M, best_M)
        best_KM = torch.where(better_M, codes_KM, best_KM)
    return _without_zeros(best_KM + top, scale_M, largest_M)


def positive(x_KM: Tensor, top: int, weight_KM: Tensor) -> Fit:
    """Fit codes from 0 to `top` to values that are not negative (make_qp_quants)."""
    largest_M = x_KM.amax(0).clamp_(min=0)
    best_M, error_M = over(float(top), largest_M), None
    for step in (0, *range(-4, 0), *range(1, 5)):
        inverse_M = over(_sum(top, (0.1, step)), largest_M)
        codes_KM = nearest(inverse_M * x_KM).float()
        if step != 0:
            codes_KM.clamp_(max=top)
        rest_KM = x_KM - over(1.0, inverse_M) * codes_KM
        own_M = total(weight_KM * rest_KM * rest_KM)
        if error_M is None:
            error_M = own_M
            continue
        better_M = own_M < error_M
        best_M = torch.where(better_M, inverse_M, best_M)
        error_M = torch.where(better_M, own_M, error_M)
    codes_KM = nearest(best_M * x_KM).clamp_(max=top).float()
    return _without_zeros(*_descend(x_KM, weight_KM, codes_KM, (0, top), both=True), largest_M)


def affine(
    x_KM: Tensor, weight_KM: Tensor, top: int, first: float, delta: float, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit codes from 0 to `top` over a smallest value, by regression (make_qkx2, make_qkx3).

    The last result is what is subtracted of values under scales.

    The smallest value of the best fit is the one from which later candidates are coded.
    """
    low_M, high_M = x_KM.amin(0).clamp_(max=0), x_KM.amax(0)
    flat_M, smallest_M = high_M == low_M, low_M
    weights_M, x_M = total(weight_KM), total(weight_KM * x_KM)
    inverse_M = over(float(top), high_M - low_M)
    scale_M = over(1.0, inverse_M)
    best_KM = nearest(inverse_M * (x_KM - low_M)).clamp_(0, top).float()
    error_M = _squared(scale_M * best_KM + low_M - x_KM, weight_KM)
    for step in range(steps + 1):
        inverse_M = over(_sum(first, (delta, step), top), high_M - low_M)
        codes_KM = nearest(inverse_M * (x_KM - low_M)).clamp_(0, top).float()
        weighted_KM = weight_KM * codes_KM
        l_M, l2_M = total(weighted_KM), total(weighted_KM * codes_KM)
        xl_M = total(weighted_KM * x_KM)
        determinant_M = weights_M * l2_M - l_M * l_M
        own_scale_M = (weights_M * xl_M - x_M * l_M) / determinant_M
        own_low_M = (l2_M * x_M - l_M * xl_M) / determinant_M
        own_scale_M = torch.where(own_low_M > 0, xl_M / l2_M, own_scale_M)
        own_low_M = own_low_M.clamp(max=0)
        own_M = _squared(own_scale_M * codes_KM + own_low_M - x_KM, weight_KM)
        better_M = (determinant_M > 0) & (own_M < error_M)
        best_KM = torch.where(better_M, codes_KM, best_KM)
        error_M = torch.where(better_M, own_M, error_M)
        scale_M = torch.where(better_M, own_scale_M, scale_M)
        low_M = torch.where(better_M, own_low_M, low_M)
    offset_M = -torch.where(flat_M, smallest_M, low_M)
    return torch.where(flat_M, 0.0, best_KM), torch.where(flat_M, 0.0, scale_M), offset_M


def _descend(
    x_KM: Tensor, weight_KM: Tensor, codes_KM: Tensor, bounds: tuple[int, int], *, both: bool
) -> Fit:
    """Move each code to where it fits best beside the others, five times at most.

    With `both`, the sum of squared codes without the code has to be positive, too.
    """
    codes_KM = codes_KM.clone()
    product_KM = weight_KM * x_KM
    lx_M, l2_M = total(product_KM * codes_KM), total(weight_KM * codes_KM * codes_KM)
    for _ in range(_DESCENTS):
        before_KM = codes_KM.clone()
        for k, code_M in enumerate(before_KM):
            weight_M, product_M = weight_KM[k], product_KM[k]
            rest_lx_M = lx_M - product_M * code_M
            rest_l2_M = l2_M - weight_M * code_M * code_M
            new_M = nearest(x_KM[k] * rest_l2_M / rest_lx_M).clamp_(*bounds).float()
            new_lx_M = rest_lx_M + product_M * new_M
            new_l2_M = rest_l2_M + weight_M * new_M * new_M
            better_M = (rest_lx_M > 0) & (new_M != code_M) & (new_l2_M > 0)
            better_M &= new_lx_M * new_lx_M * l2_M > lx_M * lx_M * new_l2_M
            if both:
                better_M &= rest_l2_M > 0
            codes_KM[k] = torch.where(better_M, new_M, code_M)
            lx_M = torch.where(better_M, new_lx_M, lx_M)
            l2_M = torch.where(better_M, new_l2_M, l2_M)
        on_host = codes_KM.device.type == "cpu"
        if on_host and torch.equal(codes_KM, before_KM):  # a GPU would wait to tell
            break
    return codes_KM, torch.where(l2_M > 0, lx_M / l2_M, 0.0)


def _without_zeros(codes_KM: Tensor, scale_M: Tensor, largest_M: Tensor) -> Fit:
    zero_M = largest_M.abs() < SMALLEST
    return torch.where(zero_M, 0.0, codes_KM), torch.where(zero_M, 0.0, scale_M)


def _squared(difference_KM: Tensor, weight_KM: Tensor) -> Tensor:
    return total(weight_KM * (difference_KM * difference_KM))


def _sum(*terms: float | tuple[float, int]) -> float:
    total = np.float32(0)
    for term in terms:
        value = term if isinstance(term, tuple) else (term, 1)
        total = total + np.float32(value[0]) * np.float32(value[1])
    return float(total)
