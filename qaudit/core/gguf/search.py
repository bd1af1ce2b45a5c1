"""The searches for scales and codes of llama.cpp's quantizers, in the order of their sums.

Each works on many groups at once: K values of a group are rows, M groups are columns. Sums are
taken value by value in float32, as C code does, so that bytes are equal where a compiler contracts
no products and sums (x86-64 builds of ggml).

Shapes: K values of a group, M groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qaudit.support.lazy import Tensor, torch

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


def descended(x_KM: Tensor, top: int) -> Fit:
    """Fit codes about `top`, one value after another, weighted by squares (make_q3_quants)."""
    weight_KM = x_KM * x_KM
    largest_M = x_KM.gather(0, x_KM.abs().argmax(0, keepdim=True))[0]
    inverse_M = over(-float(top), largest_M, largest_M)
    codes_KM = nearest(inverse_M * x_KM).clamp_(-top, top - 1).float()
    fit = _descend(x_KM, weight_KM, codes_KM, (-top, top - 1), both=False)
    return _without_zeros(fit.codes_KM + top, fit.scale_M, largest_M)


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
