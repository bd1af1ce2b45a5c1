"""Products with the Hessian of small models, and traces and ends of spectra, against plain ones.

Everything is in double precision but for what `transformers` computes in float32 whatever a
model's dtype is, its norms: sums in another order then differ by 1e-7 of what is summed.
"""

import math
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from qaudit.core.spectrum import FEWEST, beside, dot, estimate_trace, find_ends, norm, signs
from qaudit.diagnostics.curvature_measure import LossHessian, cut, recomputed
from qaudit.errors import SourceError
from qaudit.types import Window
from tests.support.problems import symmetric
from tests.support.tiny import FAMILIES

CONTEXT = 12
SHAPE = {
    "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 11, "max_position_embeddings": CONTEXT,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip


def documents(vocabulary, count=2):
    """Return documents of two windows each, of unequal lengths, the second with a context."""
    random = np.random.default_rng(5)

    def window(document, length, scored_from):
        tokens = random.integers(0, vocabulary, length).astype(np.int32)
        return Window(document, tokens, scored_from)

    return [[window(d, 9 - d, 1), window(d, 7, 3)] for d in range(count)]


@pytest.fixture(scope="module")
def small():
    """A Llama of a few hundred parameters in double precision, its embedding tied."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def hessian(small):
    return LossHessian(small, list(small.model.layers), cut(documents(11), CONTEXT, 24))


def mean_loss(model, cases):
    """Return the mean loss of a token, window by window, the slow way."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for windows in cases:
        for window in windows:
            tokens_T = torch.from_numpy(window.tokens.astype("int64"))
            logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0]
            scored = slice(window.scored_from, None)
            before = slice(window.scored_from - 1, -1)
            total = total + nn.functional.cross_entropy(
                logits_TV[before].double(), tokens_T[scored], reduction="sum"
            )
            tokens += window.scored
    return total / tokens


def matrix_of(model, cases):
    """Return the Hessian itself, by two reverse passes, row after row."""
    parameters = list(model.parameters())
    first = torch.autograd.grad(mean_loss(model, cases), parameters, create_graph=True)
    first_P = torch.cat([gradient.flatten() for gradient in first])
    identity = torch.eye(len(first_P), dtype=first_P.dtype)
    rows = torch.autograd.grad(first_P, parameters, identity, is_grads_batched=True)
    return torch.cat([row.flatten(1) for row in rows], dim=1)


def rounding(entries):
    """Return how far a sum of all entries is off if each is good to a unit of float32."""
    return torch.finfo(torch.float32).eps * float(entries.detach().abs().sum())


def must_agree(found, expected):
    largest = float(expected.detach().abs().max())
    assert largest > 0
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=3e-6 * largest)


@pytest.fixture(scope="module")
def matrix(small):
    small.set_attn_implementation("eager")
    return matrix_of(small, documents(11))


def test_products_forms_and_loss_are_those_of_the_exact_hessian(small, hessian, matrix):
    """Forms are of each document and each tensor."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(len(matrix), generator=generator, dtype=torch.float64)
    must_agree(hessian.multiply(drawn), matrix @ drawn)
    vector = signs(len(matrix), 3, hessian.like)
    _, forms = hessian(vector)
    count = len(hessian.tokens_D)
    for d, case in enumerate(documents(11)):
        alone = matrix_of(small, [case]) * sum(w.scored for w in case)
        expected = float(vector @ alone @ vector)
        assert forms[d] == pytest.approx(expected, rel=0, abs=rounding(alone))
    by_entry = (vector * (matrix @ vector)).split(hessian.sizes)
    for form, part, rows in zip(forms[count:], by_entry, matrix.split(hessian.sizes), strict=True):
        assert form == pytest.approx(float(part.sum()), rel=0, abs=rounding(rows))
    assert hessian.loss() == pytest.approx(mean_loss(small, documents(11)).item(), rel=1e-7)
    alone = LossHessian(small, list(small.model.layers), cut(documents(11), CONTEXT, 1))
    must_agree(alone.multiply(vector), hessian.multiply(vector))  # one window at a time


def test_trace_and_ends_are_those_of_the_exact_hessian(hessian, matrix):
    size = len(matrix)
    values = np.linalg.eigvalsh(matrix.detach().numpy())
    ends = find_ends(hessian.multiply, size, hessian.like, count=2, tolerance=1e-4)
    # An eigenvalue moves by no more than the row that moves most.
    most = max(map(rounding, matrix))
    assert [e.value for e in ends.largest] == pytest.approx(values[::-1][:2], rel=0, abs=most)
    found = estimate_trace(hessian, size, hessian.like, probes=25, tolerance=0.0)
    off = float((matrix.detach() ** 2).sum() - (matrix.detach().diagonal() ** 2).sum())
    error = (2 * off / 25) ** 0.5  # what the theory says of random signs
    assert abs(found.interval.estimate - matrix.trace().item()) < 4 * error
    assert found.standard_error == pytest.approx(error, rel=0.6)


@pytest.mark.parametrize("family", ["olmo2", "gpt_neox", "gemma2", "gpt2", "bloom"])
def test_recomputing_blocks_changes_no_derivative_of_any_kind_of_block(family):
    config = AutoConfig.for_model(family, **FAMILIES[family])
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    blocks = list(
        model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h
    )
    parts = cut(documents(200), CONTEXT, 24)
    ours, plain = LossHessian(model, blocks, parts), LossHessian(model, [], parts)
    vector = signs(sum(ours.sizes), 0, ours.like)
    must_agree(ours.multiply(vector), plain.multiply(vector))
    assert all("forward" not in vars(block) for block in blocks)


def test_recomputed_blocks_keep_nothing_and_a_diverged_model_is_refused(small):
    weights = {parameter.data_ptr() for parameter in small.parameters()}

    def kept(blocks):
        """Count the entries that a graph of two derivatives keeps, weights aside."""
        held = weakref.WeakSet()

        def keep(tensor):
            held.add(holder := partial(torch.Tensor.detach, tensor))  # gone with the graph
            return holder

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda holder: holder.args[0])
        with hooks, recomputed(blocks):
            tokens = torch.arange(10)[None]
            out = small.model(input_ids=tokens, use_cache=False).last_hidden_state.sum()
            first = torch.autograd.grad(
                out, list(small.parameters()), create_graph=True, allow_unused=True
            )
            entries = {h().data_ptr(): h().numel() for h in held}
            assert len(first) == len(weights)
        return sum(count for place, count in entries.items() if place not in weights)

    assert kept(list(small.model.layers)) < kept([]) / 4
    first = next(iter(small.parameters()))
    whole = first.detach().clone()
    try:
        first.data[3:].fill_(torch.nan)
        broken = LossHessian(small, list(small.model.layers), cut(documents(11), CONTEXT, 24))
        with pytest.raises(SourceError, match="not finite"):
            broken.multiply(signs(sum(broken.sizes), 0, broken.like))
    finally:
        first.data.copy_(whole)


@pytest.mark.gpu
def test_a_gpu_makes_the_same_product():
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    parts = cut(documents(11), CONTEXT, 24)
    here = LossHessian(model, list(model.model.layers), parts)
    vector = signs(sum(here.sizes), 0, here.like)
    expected = here.multiply(vector)
    model.to("cuda")
    there = LossHessian(model, list(model.model.layers), parts)
    must_agree(there.multiply(vector.cuda()).cpu(), expected)


# --------------------------------------------------------------------- spectra that are known


LIKE = torch.zeros(1, dtype=torch.float64)


def times(matrix_PP):
    def product(vector_P):
        image_P = matrix_PP @ vector_P
        return image_P, (vector_P * image_P).numpy()

    return product


def trace_of(matrix_PP, **probing):
    given = {"tolerance": 0.0, "probes": 40, **probing}
    return estimate_trace(times(matrix_PP), len(matrix_PP), LIKE, **given)


@given(st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=40)
def test_a_diagonal_matrix_is_exact_at_every_probe(size, seed):
    diagonal = torch.diag(symmetric(size, seed).diagonal())
    found = trace_of(diagonal, probes=3)
    assert found.samples_N == pytest.approx(float(diagonal.trace()), rel=1e-9, abs=1e-9)


def test_intervals_hold_the_trace_and_probes_scatter_as_often_as_the_theory_says():
    # 300 matrices at 90 %: 30 misses, give or take 5.2. A right interval is outside of these
    # bounds about once in 2,000 seeds, and the seeds are fixed.
    missed = 0
    for seed in range(300):
        matrix = symmetric(12, seed)
        found = trace_of(matrix, probes=20, seed=seed, confidence=0.9).interval
        missed += not found.low <= float(matrix.trace()) <= found.high
    assert 12 <= missed <= 52
    # Var(v.Hv) = 2 * the sum of squares off the diagonal; 1,500 probes know it to about 4 %.
    matrix = symmetric(10, 3)
    found = trace_of(matrix, probes=1500)
    off = float((matrix**2).sum() - (matrix.diagonal() ** 2).sum())
    assert found.samples_N.var(ddof=1) == pytest.approx(2 * off, rel=0.1)


def test_probing_stops_at_the_tolerance_and_not_before_it_can_be_known():
    nearly = torch.diag(torch.ones(20, dtype=torch.float64)) + 1e-3 * symmetric(20, 1)
    found = trace_of(nearly, tolerance=0.05)
    assert found.reached
    assert len(found.samples_N) == FEWEST
    assert not trace_of(symmetric(20, 1), tolerance=1e-9).reached
    alone = trace_of(symmetric(4, 0), probes=1).interval
    assert (alone.low, alone.high) == (-np.inf, np.inf)
    matrix = symmetric(8, 2)
    few, more = trace_of(matrix, probes=5), trace_of(matrix, probes=9)
    assert (more.samples_N[:5] == few.samples_N).all()
    assert not (trace_of(matrix, probes=5, seed=1).samples_N == few.samples_N).any()
    assert more.forms_NK.sum(axis=1) == pytest.approx(more.samples_N)


def ends_of(matrix_PP, **search):
    given = {"steps": len(matrix_PP), "tolerance": 1e-9, **search}
    return find_ends(lambda v: matrix_PP @ v, len(matrix_PP), LIKE, **given)


@given(st.integers(1, 25), st.integers(0, 10**6))
def test_all_steps_find_both_ends_exactly(size, seed):
    matrix = symmetric(size, seed)
    values = np.linalg.eigvalsh(matrix.numpy())
    found = ends_of(matrix, count=min(3, size), tolerance=0.0)
    assert [e.value for e in found.largest] == pytest.approx(values[::-1][:3], rel=1e-8, abs=1e-8)
    assert found.smallest.value == pytest.approx(values[0], rel=1e-8, abs=1e-8)


@given(st.integers(2, 40), st.integers(2, 10), st.integers(0, 10**6))
def test_an_eigenvalue_lies_within_each_residual(size, steps, seed):
    matrix = symmetric(size, seed)
    values = np.linalg.eigvalsh(matrix.numpy())
    found = ends_of(matrix, steps=steps, count=2)
    for end in (*found.largest, found.smallest):
        assert abs(values - end.value).min() <= end.residual + 1e-9
        assert values[0] - 1e-9 <= end.value <= values[-1] + 1e-9


def test_ends_and_what_is_left_beside_others_are_right_in_single_precision():
    found = ends_of(torch.zeros(4, 4, dtype=torch.float64), count=2)
    assert [e.value for e in found.largest] == [0.0, 0.0]
    # Without reorthogonalization copies of 1000 turn up among the largest.
    values = torch.cat([torch.linspace(0, 1, 400), torch.tensor([1000.0])])
    found = find_ends(lambda v: values * v, 401, torch.zeros(1), count=2, steps=60, tolerance=0.0)
    assert found.largest[0].value == pytest.approx(1000, rel=1e-5)
    assert found.largest[1].value < 1.01
    found = find_ends(lambda v: v * math.nan, 4, LIKE, steps=4)
    assert found.steps == 1
    assert not found.reached
    assert math.isnan(found.largest[0].value)
    generator = torch.Generator().manual_seed(0)
    others = []
    common = torch.randn(500, generator=generator)
    for _ in range(6):  # nearly parallel: one sweep would leave much of them
        left = beside(common + 1e-3 * torch.randn(500, generator=generator), others)
        others.append(left / norm(left))
    gram = np.array([[dot(a, b) for a in others] for b in others])
    assert abs(gram - np.eye(6)).max() < 1e-5
