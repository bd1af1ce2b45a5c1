"""QUIK and Atom against the published loop, which has the kept columns at its end."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from qaudit.core.outliers import LARGEST_SHARE, Split, round_mixed
from qaudit.core.registry import parse_scheme
from qaudit.core.schemes.gptq import Gptq
from qaudit.core.stored import INDEX_BITS
from qaudit.errors import SchemeError
from tests.support.reference.plain_gptq import find_scale
from tests.support.schemes import COLUMNS, example


def plain_loop(weight_RC, gram_CC, order, kept, *, bits, group, damp):
    """Round as GPTQ's published code does, but for the last columns; in double precision."""
    weight, gram = weight_RC[:, order].copy(), gram_CC[np.ix_(order, order)].copy()
    gram += damp * np.mean(np.diag(gram)) * np.eye(len(gram))
    upper = np.linalg.cholesky(np.linalg.inv(gram)).T
    rest = len(order) - kept
    group = rest if group == -1 else group
    for j in range(rest):
        if j % 128 == 0:
            seen = weight.copy()  # a group's scales have seen the errors of whole blocks only
        if j % group == 0:
            part = seen[:, j : min(j + group, rest)]
            scale, zero = find_scale(part, bits, symmetric=True, scale_dtype="float32")
        codes = np.clip(np.round(weight[:, j] / scale) + zero, 0, 2**bits - 1)
        rounded = (codes - zero) * scale
        error = (weight[:, j] - rounded) / upper[j, j]
        weight[:, j + 1 :] -= np.outer(error, upper[j, j + 1 :])
        weight[:, j] = rounded
    out = np.empty_like(weight)
    out[:, order] = weight
    return out


class _AsIs:
    """Keeps columns in double precision."""

    nbits = 0

    def __init__(self, weight):
        self.weight = weight

    def decode(self):
        return self.weight


@pytest.mark.parametrize("group", [-1, 16])
@pytest.mark.parametrize("kept", [0, 3, 10])
def test_eliminating_kept_columns_is_the_published_loop(kept, group):
    linears = example(torch.float64)
    gram_CC = linears.inputs.gram_CC.double()
    damp = 0.01
    gram_CC.diagonal().add_(damp * gram_CC.diagonal().mean())
    inputs = dataclasses.replace(linears.inputs, gram_CC=gram_CC)
    split = Split.by(gram_CC.diagonal(), kept)
    rounding = Gptq(bits=4, group=group, act_group_aware=False, damp=1e-12, scale_dtype="float32")
    stored, notes = round_mixed(
        dataclasses.replace(linears, inputs=inputs), split, rounding, _AsIs, damp=0.0, indices=0
    )
    order = torch.cat([split.rest_I, split.kept_K]).numpy()
    assert not notes or group == 16
    for name, weight in linears.weights.items():
        expected = plain_loop(
            weight.numpy(), gram_CC.numpy(), order, kept, bits=4, group=group, damp=0.0
        )
        found = stored[name].decode().double().numpy()
        same = np.abs(found - expected) <= 1e-6 * np.abs(expected).max()
        assert same.mean() > 0.99  # a weight at a tie moves the rest of its row a little


def test_kept_columns_take_up_what_the_others_lost():
    linears = example()
    gram = linears.inputs.gram_CC.double()
    errors = {}
    for keep in (0, 10):
        quantized = parse_scheme(f"quik-4bit:keep={keep}").quantize(linears)
        errors[keep] = sum(
            float((((quantized.weights[n] - w).double() @ gram) * (quantized.weights[n] - w)).sum())
            for n, w in linears.weights.items()
        )
    assert errors[10] < errors[0] / 2


def test_quik_keeps_the_largest_inputs_and_rounds_the_others_by_token():
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


def test_the_last_linears_of_a_block_have_eight_bits():
    last = dataclasses.replace(example(), is_last=True)
    quik = parse_scheme("quik-4bit")
    more, less = quik.quantize(last), quik.quantize(example())
    numbers = sum(weight.numel() for weight in last.weights.values())
    rows = sum(len(weight) for weight in last.weights.values())
    kept = COLUMNS // LARGEST_SHARE
    assert more.bits - less.bits == 4 * (numbers - rows * kept)


def test_atom_cuts_groups_and_has_eight_bits_for_the_heaviest():
    linears = example()
    quantized = parse_scheme("atom-4bit:group=50:keep=10").quantize(linears)
    order = torch.argsort(linears.inputs.gram_CC.diagonal(), stable=True)
    x = linears.inputs.sample_TC[:20]
    expected = torch.empty_like(x)
    for columns, bits, clip in (
        (order[:50], 4, 0.9),
        (order[50:100], 4, 0.9),
        (order[100:150], 4, 0.9),
        (order[150:], 8, 1.0),
    ):
        top = 2 ** (bits - 1) - 1
        scale = clip * x[:, columns].abs().amax(1, keepdim=True) / top
        expected[:, columns] = (x[:, columns] / scale).round().clamp(-top - 1, top) * scale
    assert torch.allclose(quantized.inputs(x), expected, rtol=1e-5, atol=1e-6)


def test_at_most_one_column_in_sixteen_is_kept_and_a_note_says_so():
    quantized = parse_scheme("quik-4bit").quantize(example())
    assert "10 of 160 columns keep more bits, not 256" in quantized.notes
    rows = sum(len(weight) for weight in example().weights.values())
    assert quantized.bits == rows * (150 * 4 + 16 + 10 * 16) + 2 * 10 * INDEX_BITS


@pytest.mark.parametrize("spec", ["quik-4bit:keep=-1", "atom-4bit:keep=-3", "atom-4bit:clip=2"])
def test_parameters_out_of_range_are_refused(spec):
    with pytest.raises(SchemeError):
        parse_scheme(spec)
