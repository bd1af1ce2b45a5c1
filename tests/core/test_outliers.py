"""Outliers: int8 and SmoothQuant by their formulas, QUIK and Atom by the published loop."""

import dataclasses

import numpy as np
import pytest
import torch

from qaudit.core.registry import parse_scheme
from qaudit.errors import SourceError
from tests.support.filled import filled
from tests.support.reference.plain_gptq import gptq, stored_scale
from tests.support.schemes import COLUMNS, example


def test_tokens_are_rounded_to_127_and_a_half_steps():
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    quantized = parse_scheme("int8").quantize(example())
    scale = x.abs().amax(1, keepdim=True) / 127.5
    expected = (x / scale).round().clamp(-128, 127) * scale
    # One float32 rounding of a scale, and of a product.
    assert torch.allclose(quantized.inputs(x), expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_smoothquant_moves_columns_as_published(alpha):
    linears = example(fold=True)
    quantized = parse_scheme(f"smoothquant:alpha={alpha}").quantize(linears)
    weights = torch.cat(list(linears.weights.values())).double()
    largest = weights.abs().amax(0).clamp(min=1e-5)
    scale = linears.inputs.absmax_C.double() ** alpha / largest ** (1 - alpha)
    assert torch.allclose(quantized.column_scale_C.double(), scale, rtol=1e-5)
    x = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(1))
    x *= linears.inputs.absmax_C / 3
    scale = quantized.column_scale_C

    def rounded(values):  # in float32: the largest of a row is at a tie, between 127 and 128
        step = values.abs().amax(1, keepdim=True) / 127.5
        step = torch.where(step == 0, 1.0, step)
        return (values / step).round().clamp(-128, 127) * step

    for name, weight in linears.weights.items():
        expected = rounded(x / scale).double() @ rounded(weight * scale).double().T
        output = quantized.inputs(x) @ quantized.weights[name].T
        # Roundings of 160 products and of the scales that are multiplied and divided by.
        assert (output - expected).norm() / expected.norm() < 1e-5


def test_linears_behind_no_norm_have_no_scales_and_post_norm_models_are_refused_by_name():
    linears = dataclasses.replace(example(fold=True), fold_is_norm=False)
    smooth, plain = (parse_scheme(s).quantize(linears) for s in ("smoothquant", "int8"))
    assert smooth.column_scale_C is None
    for name, weight in plain.weights.items():
        assert torch.equal(smooth.weights[name], weight)
    linears = dataclasses.replace(example(), block_has_norm_folds=False, block=3)
    with pytest.raises(SourceError, match=r"no norm of block 3 .*`attn\.q_proj`") as refused:
        parse_scheme("smoothquant").quantize(linears)
    assert "`int8`" in refused.value.hint


def cut(share):
    """Return the scale of a row by its range, cut to a share of itself."""

    def find(part_RK, bits):
        return stored_scale(share * 2 * np.abs(part_RK).max(1) / (2**bits - 1), "bf16")

    return find


def best_of_80(part_RK, bits):
    """Return the scale of each row that leaves the least sum of |error|^2.4, one at a time."""
    top, scales = 2 ** (bits - 1) - 1, np.empty(len(part_RK))
    for r, row in enumerate(part_RK):
        largest = np.abs(row).max() or 1.0
        tried = stored_scale(np.array([1 - k / 100 for k in range(80)]) * largest / top, "bf16")
        rounded = [np.clip(np.round(row / s), -top - 1, top) * s for s in tried]
        losses = [np.sum(np.abs(one - row) ** 2.4) for one in rounded]
        scales[r] = tried[int(np.argmin(losses))]
    return scales


def in_eight_bits(weight):
    scale = stored_scale(np.abs(weight).max(1) / 127, "bf16")[:, None]
    return np.clip(np.round(weight / scale), -128, 127) * scale


def check(spec, order, kept, find, keep, *, bits=4, group=-1, last=False):
    linears = dataclasses.replace(example(torch.float64), is_last=last)
    # A row of zeros has any scale, and no error.
    quantized = parse_scheme(spec).quantize(linears)
    for name, weight in filled(linears.weights.items()):
        _, expected = gptq(
            weight.numpy(), linears.inputs.gram_CC.double().numpy(), bits=bits, group=group,
            damp=0.01, order=order.numpy(), kept=kept, keep=keep,
            find=lambda part: (np.where(part.any(1), find(part, bits), 1.0), 2 ** (bits - 1)),
        )  # fmt: skip
        same = np.abs(quantized.weights[name].numpy() - expected) <= 1e-9 * np.abs(expected).max()
        assert same.all(), (name, same.mean())


@pytest.mark.parametrize(
    ("kept", "search", "last"),
    [*((kept, search, False) for kept in (0, 3, 10) for search in (True, False)), (10, True, True)],
)
def test_quik_is_the_published_loop_on_the_scales_it_searches(kept, search, last):
    order = torch.argsort(example(torch.float64).inputs.absmax_C, stable=True)
    spec = f"quik-4bit:keep={kept}:search={str(search).lower()}"
    find = best_of_80 if search else cut(15 / 14)  # max / 7
    bits, stored = 8 if last else 4, lambda one: torch.from_numpy(one).bfloat16().double().numpy()
    check(spec, order, kept, find, stored, bits=bits, last=last)


@pytest.mark.parametrize("group", [-1, 16, 64])
@pytest.mark.parametrize("kept", [0, 10])
def test_atom_is_the_published_loop_in_cut_groups_and_eight_bits(kept, group):
    order = torch.argsort(example().inputs.gram_CC.diagonal(), stable=True)
    spec = f"atom-4bit:keep={kept}:group={group}"
    check(spec, order, kept, cut(0.85), in_eight_bits, group=group)


@pytest.mark.parametrize("group", [-1, 64])
@pytest.mark.parametrize("name", ["quarot", "quarot-rtn"])
def test_quarot_rounds_onto_the_scales_it_searches(name, group):
    linears = example(torch.float64)
    find, spec = best_of_80, f"{name}-4bit:rotate=false:act=16:group={group}"
    if name == "quarot":
        check(spec, torch.arange(COLUMNS), 0, find, None, group=group)
        return
    quantized = parse_scheme(spec).quantize(linears)
    size = COLUMNS if group == -1 else group
    for key, weight in linears.weights.items():
        for a in range(0, COLUMNS, size):
            part = weight[:, a : a + size].numpy()
            scale = find(part, 4)[:, None]
            expected = np.clip(np.round(part / scale), -8, 7) * scale
            np.testing.assert_array_equal(quantized.weights[key][:, a : a + size], expected)


@pytest.mark.parametrize("last", [False, True])
def test_linears_without_outliers_keep_no_column(last):
    linears = dataclasses.replace(example(), is_last=last)
    largest = float(linears.inputs.absmax_C.max()) / (2 if last else 1)
    ends = (f"keep=5:threshold={share * largest}" for share in (1.001, 0.999))
    above, below = (parse_scheme(f"quik-4bit:{end}").quantize(linears) for end in ends)
    assert {one.kept is None for one in above.stored.values()} == {True}
    assert {one.kept is None for one in below.stored.values()} == {False}
    assert above.bits < below.bits
    notes = parse_scheme("quik-4bit").quantize(linears).notes  # at most one in sixteen
    assert "10 of 160 columns keep more bits, not 256" in notes


def test_quik_keeps_the_largest_inputs_and_atom_has_eight_bits_for_the_heaviest():
    linears = example()
    quantized = parse_scheme("quik-4bit:keep=5").quantize(linears)
    kept = set(torch.argsort(linears.inputs.absmax_C, descending=True)[:5].tolist())
    x = linears.inputs.sample_TC[:20]
    changed = quantized.inputs(x)
    rest = [c for c in range(COLUMNS) if c not in kept]
    assert torch.equal(changed[:, sorted(kept)], x[:, sorted(kept)])
    part = x[:, rest]
    low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    expected = ((part / scale).round().clamp(-zero, 15 - zero)) * scale
    assert torch.allclose(changed[:, rest], expected, rtol=1e-5, atol=1e-6)
    linears = example()
    quantized = parse_scheme("atom-4bit:group=50:keep=10").quantize(linears)
    order = torch.argsort(linears.inputs.gram_CC.diagonal(), stable=True)
    x = linears.inputs.sample_TC[:20]
    expected = torch.empty_like(x)
    low = ((order[a : a + 50], 4, 0.9) for a in (0, 50, 100))
    for columns, bits, clip in (*low, (order[150:], 8, 1.0)):
        top = 2 ** (bits - 1) - 1
        scale = clip * x[:, columns].abs().amax(1, keepdim=True) / top
        expected[:, columns] = (x[:, columns] / scale).round().clamp(-top - 1, top) * scale
    assert torch.allclose(quantized.inputs(x), expected, rtol=1e-5, atol=1e-6)
