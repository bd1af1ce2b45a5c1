"""Weights -> blocks, as ggml's quantizers make them, with and without importance.

Importance is the mean square of each column's inputs, as `llama-imatrix` collects it. Without it
ggml weighs by the weights themselves and searches less.

Shapes: R rows, C columns, N blocks, J groups of a block, K columns of a group, M = N J groups.

**The searches** for scales and codes of llama.cpp's quantizers, in the order of their sums.

Each works on many groups at once: K values of a group are rows, M groups are columns. Sums are
taken value by value in float32, as C code does, so that bytes are equal where a compiler contracts
no products and sums (x86-64 builds of ggml).

Shapes: K values of a group, M groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qaudit.core.gguf.blocks import TYPES, WIDE, assembled, half, interleave, widened
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
    if importance_RC is not None:
        return _narrow(kind, x_RC, importance_RC)
    x_NK = x_RC.reshape(-1, 32)
    if plain := {"Q8_0": _q8_0, "Q5_1": _q5_1}.get(kind):
        return plain(x_NK)
    # The lowest point of the grid is the value of largest magnitude (Q4_0, Q5_0).
    middle = 1 << (TYPES[kind].bits - 1)
    scale_N1 = x_NK.gather(1, x_NK.abs().argmax(1, keepdim=True)) / -middle
    codes_NK = (x_NK * _inverse(scale_N1) + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1)
    return _narrow_block(kind, codes_NK.to(torch.uint8), scale_N1)


def _q8_0(x_NK: Tensor) -> Tensor:
    largest_N1 = x_NK.abs().amax(1, keepdim=True)
    scale_N1 = over(largest_N1, 127.0, largest_N1)
    steps_NK = (x_NK * _inverse(scale_N1)).abs()
    floor_NK = steps_NK.floor()
    magnitude_NK = floor_NK + (2 * (steps_NK - floor_NK)).floor()
    codes_NK = torch.copysign(magnitude_NK, x_NK).to(torch.int8)
    return assembled("Q8_0", {"d": half(scale_N1), "codes": codes_NK.view(torch.uint8)})


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
    parts = {
        "d": half(d_N),
        "low": interleave(codes_NK & 15, 4, 16),
        "high": interleave(codes_NK >> 4, 1, 1),
    }
    return assembled(kind, parts if m_N is None else parts | {"m": half(m_N)})


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, over(1.0, scale, scale))


def _q3_k(x_NK: Tensor, importance_NK: Tensor | None) -> Tensor:
    x_KM = _columns(x_NK, 16)
    if importance_NK is None:
        # One value after another, weighted by squares (make_q3_quants).
        largest_M = x_KM.gather(0, x_KM.abs().argmax(0, keepdim=True))[0]
        first_KM = nearest(over(-4.0, largest_M, largest_M) * x_KM).clamp_(-4, 3).float()
        fit = _descend(x_KM, x_KM * x_KM, first_KM, (-4, 3), both=False)
        fit = _without_zeros(fit.codes_KM + 4, fit.scale_M, largest_M)
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
        "low": interleave(codes_NK & 3, 2, 32),
        "scales": torch.cat([interleave(s_NJ & 15, 4, 8), interleave(s_NJ >> 4, 2, 4)], 1),
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
        "low": interleave(codes_NK & 15, 4, 64),
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


SMALLEST = 1e-15
"""A group whose largest magnitude is below holds zeros."""

_DESCENTS = 5


@dataclass(frozen=True, eq=False)
class Fit:
    """Codes from 0 up, as float32, and what turns them into values."""

    codes_KM: Tensor
    scale_M: Tensor
    offset_M: Tensor | None = None  # what is subtracted; None: codes are about a fixed middle


def nearest(values: Tensor) -> Tensor:
    """Round to nearest, ties to even, and wrap around where ggml does: from 2^22."""
    return ((values + 12582912.0).view(torch.int32) & 0x7FFFFF) - 0x400000


def total(values_KM: Tensor) -> Tensor:
    """Sum values one after another, in float32."""
    total_M = values_KM[0] + 0.0
    for value_M in values_KM[1:]:
        total_M += value_M
    return total_M


def over(numerator: float | Tensor, denominator: float | Tensor, like: Tensor) -> Tensor:
    """Divide; CUDA multiplies by the inverse of a number that is given as such."""
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
        inverse_M = over(-_sum(top, (0.1, step)), largest_M, largest_M)
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
    best_M, error_M = over(float(top), largest_M, largest_M), None
    for step in (0, *range(-4, 0), *range(1, 5)):
        inverse_M = over(_sum(top, (0.1, step)), largest_M, largest_M)
        codes_KM = nearest(inverse_M * x_KM).float()
        if step != 0:
            codes_KM.clamp_(max=top)
        rest_KM = x_KM - over(1.0, inverse_M, inverse_M) * codes_KM
        own_M = total(weight_KM * rest_KM * rest_KM)
        if error_M is None:
            error_M = own_M
            continue
        better_M = own_M < error_M
        best_M = torch.where(better_M, inverse_M, best_M)
        error_M = torch.where(better_M, own_M, error_M)
    codes_KM = nearest(best_M * x_KM).clamp_(max=top).float()
    fit = _descend(x_KM, weight_KM, codes_KM, (0, top), both=True)
    return _without_zeros(fit.codes_KM, fit.scale_M, largest_M)


def affine(
    x_KM: Tensor, weight_KM: Tensor, top: int, first: float, delta: float, steps: int
) -> Fit:
    """Fit codes from 0 to `top` over a smallest value, by regression (make_qkx2, make_qkx3).

    The smallest value of the best fit is the one from which later candidates are coded.
    """
    low_M, high_M = x_KM.amin(0).clamp_(max=0), x_KM.amax(0)
    flat_M, smallest_M = high_M == low_M, low_M
    weights_M, x_M = total(weight_KM), total(weight_KM * x_KM)
    inverse_M = over(float(top), high_M - low_M, low_M)
    scale_M = over(1.0, inverse_M, inverse_M)
    best_KM = nearest(inverse_M * (x_KM - low_M)).clamp_(0, top).float()
    error_M = _squared(scale_M * best_KM + low_M - x_KM, weight_KM)
    for step in range(steps + 1):
        inverse_M = over(_sum(first, (delta, step), top), high_M - low_M, low_M)
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
    return Fit(
        torch.where(flat_M, 0.0, best_KM),
        torch.where(flat_M, 0.0, scale_M),
        -torch.where(flat_M, smallest_M, low_M),
    )


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
    return Fit(codes_KM, torch.where(l2_M > 0, lx_M / l2_M, 0.0))


def _without_zeros(codes_KM: Tensor, scale_M: Tensor, largest_M: Tensor) -> Fit:
    zero_M = largest_M.abs() < SMALLEST
    return Fit(torch.where(zero_M, 0.0, codes_KM), torch.where(zero_M, 0.0, scale_M))


def _squared(difference_KM: Tensor, weight_KM: Tensor) -> Tensor:
    return total(weight_KM * (difference_KM * difference_KM))


def _sum(*terms: float | tuple[float, int]) -> float:
    total = np.float32(0)
    for term in terms:
        value = term if isinstance(term, tuple) else (term, 1)
        total = total + np.float32(value[0]) * np.float32(value[1])
    return float(total)
