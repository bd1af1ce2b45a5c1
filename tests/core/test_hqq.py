"""HQQ against its formulas in numpy, group by group, in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme


def reference(weight, bits, group):
    """Return codes, scales and zero points, one (codes, scale, zero) for each group."""
    rows, columns = weight.shape
    group = columns if group == -1 else group
    groups = [(r, slice(c, c + group)) for r in range(rows) for c in range(0, columns, group)]
    scales, zeros = [], []
    for r, part in groups:
        values = weight[r, part]
        extent = values.max() - values.min()
        scales.append(1.0 if extent <= 1e-4 else max(extent / (2**bits - 1), 1 / 2e4))
        zero = -values.min() / scales[-1]
        zeros.append(np.round(zero) if bits == 4 else zero)

    def codes_of(k):
        values = weight[groups[k]]
        return np.clip(np.round(values / scales[k] + zeros[k]), 0, 2**bits - 1)

    best = np.inf
    for _ in range(20):
        total = 0.0
        for k, place in enumerate(groups):
            codes = codes_of(k)
            x = weight[place] - (codes - zeros[k]) * scales[k]
            total += np.abs(x).sum()
            with np.errstate(divide="ignore"):
                e = np.sign(x) * np.maximum(np.abs(x) - np.abs(x) ** (0.7 - 1) / 10, 0)
            zeros[k] = np.mean(codes - (weight[place] - e) / scales[k])
        if total / weight.size >= best:
            break
        best = total / weight.size
    dense = np.zeros_like(weight)
    for k, place in enumerate(groups):
        dense[place] = (codes_of(k) - zeros[k]) * scales[k]
    return dense, np.array(scales).reshape(rows, -1), np.array(zeros).reshape(rows, -1)


def weights(rows, columns, seed=0):
    generator = np.random.default_rng(seed)
    # Heavy tails, as in trained layers, are what the power of 0.7 is for.
    return 0.05 * generator.standard_t(4, (rows, columns))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("columns", "group", "size"), [(160, 64, 1), (96, -1, 20), (40, 16, 9)])
def test_codes_scales_and_zeros_are_the_published_ones(bits, columns, group, size):
    weight = size * weights(12, columns, seed=bits)  # errors of large weights do not all vanish
    scheme = parse_scheme(f"hqq-{bits}bit:group={group}:scale_dtype=float32")
    quantized = scheme.quantize(Linears({"w": torch.from_numpy(weight)}))
    dense, scales, zeros = reference(weight, bits, group)
    stored = quantized.stored["w"]
    # Both in float64, in sums of another order; no code is that near to a tie in these weights.
    np.testing.assert_allclose(stored.scales_RG.numpy(), scales, rtol=1e-12)
    np.testing.assert_allclose(stored.zeros_RG.numpy(), zeros, rtol=0, atol=1e-9)
    np.testing.assert_allclose(quantized.weights["w"].numpy(), dense, rtol=0, atol=1e-10)


def test_zero_points_are_stored_as_scales_are():
    linears = Linears({"w": torch.from_numpy(weights(8, 128)).float()})
    for scale_dtype, width in (("bf16", 16), ("float32", 32)):
        quantized = parse_scheme(f"hqq-4bit:scale_dtype={scale_dtype}").quantize(linears)
        assert quantized.bits == 8 * 128 * 4 + 8 * 2 * 2 * width
        stored = quantized.stored["w"]
        assert stored.zeros_RG.dtype == stored.scales_RG.dtype
        assert float((stored.zeros_RG.float() % 1).abs().max()) > 0
