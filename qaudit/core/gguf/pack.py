"""Weights -> blocks, as ggml's quantizers make them, with and without importance.

Importance is the mean square of each column's inputs, as `llama-imatrix` collects it. Without it
ggml weighs by the weights themselves and searches less.

Shapes: R rows, C columns, N blocks, J groups of a block, K columns of a group, M = N J groups.
"""

from __future__ import annotations

from qaudit.core.gguf.blocks import (
    TYPES,
    WIDE,
    assembled,
    fifth_bits,
    half,
    interleave,
    pair,
    six_bit_pairs,
    six_bits,
    widened,
)
from qaudit.core.gguf.search import (
    SMALLEST,
    affine,
    descended,
    nearest,
    over,
    positive,
    root,
    symmetric,
    total,
)
from qaudit.support.lazy import Tensor, torch

_AT_ONCE = {"cpu": 1 << 19}
_ELSEWHERE = 1 << 25
"""Weights that are searched together: what fits a processor's cache, or fills a device."""

_WITHOUT = {"Q4_K": (-1.0, 0.1, 20), "Q5_K": (-0.5, 0.1, 15)}
_WITH = (-0.9, 0.05, 36)
"""First candidate, distance and number of further candidates, beside the number of steps."""


def pack(kind: str, weight_RC: Tensor, importance_C: Tensor | None = None) -> Tensor:
    """Return the blocks of a matrix whose columns the type's blocks divide, (R, bytes)."""
    rows = max(1, _AT_ONCE.get(weight_RC.device.type, _ELSEWHERE) // weight_RC.shape[1])
    parts = []
    for part_RC in weight_RC.split(rows):
        weights_RC = None
        if importance_C is not None and kind != "Q8_0":
            weights_RC = importance_C.float().expand_as(part_RC)
        parts.append(_packed(kind, part_RC.float(), weights_RC).reshape(len(part_RC), -1))
    return torch.cat(parts)


def _packed(kind: str, x_RC: Tensor, importance_RC: Tensor | None) -> Tensor:
    if TYPES[kind].columns == WIDE:
        x_NK = x_RC.reshape(-1, WIDE)
        importance_NK = None if importance_RC is None else importance_RC.reshape(-1, WIDE)
        make = {"Q3_K": _q3_k, "Q6_K": _q6_k}.get(kind)
        return make(x_NK, importance_NK) if make else _with_minima(kind, x_NK, importance_NK)
    if importance_RC is None:
        plain = {"Q8_0": _q8_0, "Q5_1": _q5_1}.get(kind)
        blocks_NK = x_RC.reshape(-1, 32)
        return plain(blocks_NK) if plain else _about_the_middle(kind, blocks_NK)
    return _narrow(kind, x_RC, importance_RC)


def _q8_0(x_NK: Tensor) -> Tensor:
    largest_N1 = x_NK.abs().amax(1, keepdim=True)
    scale_N1 = over(largest_N1, 127.0, largest_N1)
    steps_NK = (x_NK * _inverse(scale_N1)).abs()
    floor_NK = steps_NK.floor()
    magnitude_NK = floor_NK + (2 * (steps_NK - floor_NK)).floor()
    codes_NK = torch.copysign(magnitude_NK, x_NK).to(torch.int8)
    return assembled("Q8_0", {"d": half(scale_N1), "codes": codes_NK.view(torch.uint8)})


def _about_the_middle(kind: str, x_NK: Tensor) -> Tensor:
    """Round on a grid whose lowest point is the value of largest magnitude (Q4_0, Q5_0)."""
    middle = 1 << (TYPES[kind].bits - 1)
    largest_N1 = x_NK.gather(1, x_NK.abs().argmax(1, keepdim=True))
    scale_N1 = largest_N1 / -middle
    codes_NK = (x_NK * _inverse(scale_N1) + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1)
    return _narrow_block(kind, codes_NK.to(torch.uint8), scale_N1)


def _q5_1(x_NK: Tensor) -> Tensor:
    low_N1, high_N1 = x_NK.amin(1, keepdim=True), x_NK.amax(1, keepdim=True)
    scale_N1 = over(high_N1 - low_N1, 31.0, low_N1)
    codes_NK = ((x_NK - low_N1) * _inverse(scale_N1) + 0.5).trunc().to(torch.uint8)
    return _narrow_block("Q5_1", codes_NK, scale_N1, low_N1)


def _narrow(kind: str, x_RC: Tensor, importance_RC: Tensor) -> Tensor:
    """Search Q4_0, Q5_0 and Q5_1; weights depend on the mean square of a whole row."""
    power_R = total((x_RC * x_RC).T.contiguous())
    power_R = over(power_R, float(x_RC.shape[1]), power_R)
    weight_RC = importance_RC * root(power_R[:, None] + x_RC * x_RC)
    x_KM, weight_KM = _columns(x_RC, 32), _columns(weight_RC, 32)
    if kind == "Q5_1":
        fit = affine(x_KM, weight_KM, 31, *_WITH)
    else:
        fit = symmetric(x_KM, 1 << (TYPES[kind].bits - 1), weight_KM)
    low_M = None if fit.offset_M is None else -fit.offset_M
    return _narrow_block(kind, fit.codes_KM.T.to(torch.uint8), fit.scale_M, low_M)


def _narrow_block(kind: str, codes_NK: Tensor, d_N: Tensor, m_N: Tensor | None = None) -> Tensor:
    parts = {"d": half(d_N), "low": pair(codes_NK, 16), "high": fifth_bits(codes_NK)}
    return assembled(kind, parts if m_N is None else parts | {"m": half(m_N)})


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, over(1.0, scale, scale))


def _q3_k(x_NK: Tensor, importance_NK: Tensor | None) -> Tensor:
    x_KM = _columns(x_NK, 16)
    if importance_NK is None:
        fit = descended(x_KM, 4)
        scales_NJ = fit.scale_M.reshape(len(x_NK), -1)
        largest_N = scales_NJ.gather(1, scales_NJ.abs().argmax(1, keepdim=True))[:, 0]
        inverse_N = over(-32.0, largest_N, largest_N)
        s_NJ = nearest(inverse_N[:, None] * scales_NJ).clamp_(-32, 31) + 32
        d_N = over(1.0, inverse_N, inverse_N)
        d_N = torch.where(largest_N == 0, 0.0, d_N)
        s_NJ = torch.where(largest_N[:, None] == 0, 0, s_NJ)
    else:
        weight_KM = _weighted(x_NK, importance_NK, 16)
        fit = symmetric(x_KM, 4, weight_KM)
        sums_JN = total(weight_KM).reshape(len(x_NK), -1).T.contiguous()
        scales = symmetric(fit.scale_M.reshape(len(x_NK), -1).T.contiguous(), 32, sums_JN)
        s_NJ, d_N = scales.codes_KM.T.int(), scales.scale_M
    s_NJ = s_NJ.to(torch.uint8)
    d_NB = half(d_N)
    step_M = (widened(d_NB) * (s_NJ.float() - 32)).flatten()
    codes_NK = _in_rows(_rounded(x_KM, fit.codes_KM, step_M, -4, 3), len(x_NK))
    parts = {
        "high": interleave(codes_NK >> 2, 1, 32),
        "low": interleave(codes_NK, 2, 32),
        "scales": six_bits(s_NJ),
        "d": d_NB,
    }
    return assembled("Q3_K", parts)


def _with_minima(kind: str, x_NK: Tensor, importance_NK: Tensor | None) -> Tensor:
    """Q4_K and Q5_K: a scale and a minimum for 32 columns, each 6 bits under a float16."""
    top = (1 << TYPES[kind].bits) - 1
    x_KM = _columns(x_NK, 32)
    if importance_NK is None:
        weight_KM = root(total(x_KM * x_KM) / 32) + x_KM.abs()
        fit = affine(x_KM, weight_KM, top, *_WITHOUT[kind])
    else:
        weight_KM = _weighted(x_NK, importance_NK, 32)
        fit = affine(x_KM, weight_KM, top, *_WITH)
    assert fit.offset_M is not None
    six = []
    for values_M in (fit.scale_M, fit.offset_M):
        values_NJ = values_M.reshape(len(x_NK), -1)
        if importance_NK is None:
            largest_N = values_NJ.amax(1).clamp_(min=0) + 0.0  # no -0
            inverse_N = torch.where(largest_N > 0, over(63.0, largest_N, largest_N), 0.0)
            codes_NJ = (nearest(inverse_N[:, None] * values_NJ) & 255).clamp_(max=63)
            six.append((codes_NJ.to(torch.uint8), half(over(largest_N, 63.0, largest_N))))
        else:
            sums_JN = total(weight_KM).reshape(len(x_NK), -1).T.contiguous()
            level = positive(values_NJ.T.contiguous(), 63, sums_JN)
            six.append((level.codes_KM.T.to(torch.uint8), half(level.scale_M)))
    (s_NJ, d_NB), (t_NJ, e_NB) = six
    step_M = (widened(d_NB) * s_NJ.float()).flatten()
    offset_M = (widened(e_NB) * t_NJ.float()).flatten()
    rounded_KM = _rounded(x_KM + offset_M, fit.codes_KM, step_M, 0, top)
    codes_NK = _in_rows(rounded_KM, len(x_NK))
    parts = {
        "d": d_NB,
        "e": e_NB,
        "scales": six_bit_pairs(s_NJ, t_NJ),
        "high": interleave(codes_NK >> 4, 1, 32),
        "low": pair(codes_NK, 32),
    }
    return assembled(kind, parts)


def _q6_k(x_NK: Tensor, importance_NK: Tensor | None) -> Tensor:
    x_KM = _columns(x_NK, 16)
    fit = symmetric(x_KM, 32, None if importance_NK is None else _columns(importance_NK, 16))
    scales_NJ = fit.scale_M.reshape(len(x_NK), -1)
    largest_N = scales_NJ.gather(1, scales_NJ.abs().argmax(1, keepdim=True))[:, 0]
    zero_N1 = (largest_N.abs() < SMALLEST)[:, None]
    inverse_N = over(-128.0, largest_N, largest_N)
    s_NJ = nearest(inverse_N[:, None] * scales_NJ).clamp_(max=127).to(torch.int8)
    d_NB = half(over(1.0, inverse_N, inverse_N))
    step_M = (widened(d_NB) * s_NJ.float()).flatten()
    codes_NK = _in_rows(_rounded(x_KM, fit.codes_KM, step_M, -32, 31), len(x_NK))
    parts = {
        "low": pair(codes_NK, 64),
        "high": interleave(codes_NK >> 4, 2, 32),
        "scales": s_NJ.view(torch.uint8),
        "d": d_NB,
    }
    return torch.where(zero_N1, 0, assembled("Q6_K", parts))


def _weighted(x_NK: Tensor, importance_NK: Tensor, group: int) -> Tensor:
    """Return importance times the size of each weight, about twice the mean square of a block."""
    power_N = 2 * total((x_NK * x_NK).T.contiguous()) / WIDE
    return _columns(importance_NK * root(power_N[:, None] + x_NK * x_NK), group)


def _rounded(x_KM: Tensor, codes_KM: Tensor, step_M: Tensor, low: int, high: int) -> Tensor:
    """Round under the scales that are stored; codes of a scale of zero stay those of the search."""
    rounded_KM = nearest(x_KM / step_M).clamp_(low, high) - low
    return torch.where(step_M == 0, codes_KM.int(), rounded_KM).to(torch.uint8)


def _columns(values: Tensor, group: int) -> Tensor:
    return values.reshape(-1, group).T.contiguous()


def _in_rows(codes_KM: Tensor, blocks: int) -> Tensor:
    return codes_KM.T.reshape(blocks, -1)
