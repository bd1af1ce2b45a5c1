"""Traces of matrices that are known, from their products alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qaudit.diagnostics.curvature.hutchinson import FEWEST, Applied, Probing, estimate_trace
from tests.support.problems import symmetric

LIKE = torch.zeros(1, dtype=torch.float64)


def times(matrix_PP: torch.Tensor):
    def product(vector_P):
        image_P = matrix_PP @ vector_P
        return Applied(image_P, (vector_P * image_P).numpy())

    return product


def trace_of(matrix_PP, **probing):
    given = Probing(**{"tolerance": 0.0, "probes": 40, **probing})
    return estimate_trace(times(matrix_PP), len(matrix_PP), LIKE, given)


@given(st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=40)
def test_a_diagonal_matrix_is_exact_at_every_probe(size: int, seed: int) -> None:
    diagonal = torch.diag(symmetric(size, seed).diagonal())
    found = trace_of(diagonal, probes=3)
    assert found.samples_N == pytest.approx(float(diagonal.trace()), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("sketch", [0, 3])
def test_the_interval_holds_the_trace_as_often_as_it_says(sketch: int) -> None:
    # 300 matrices at 90 %: 30 misses, give or take 5.2. A right interval is outside of these
    # bounds about once in 2,000 seeds, and the seeds are fixed.
    missed = 0
    for seed in range(300):
        matrix = symmetric(12, seed)
        found = trace_of(matrix, probes=20, sketch=sketch, seed=seed, confidence=0.9).interval
        missed += not found.low <= float(matrix.trace()) <= found.high
    assert 12 <= missed <= 52


def test_probes_scatter_as_much_as_the_theory_says() -> None:
    # Var(v.Hv) = 2 * the sum of squares off the diagonal; 4,000 probes know it to about 2 %.
    matrix = symmetric(10, 3)
    found = trace_of(matrix, probes=4000)
    off = float((matrix**2).sum() - (matrix.diagonal() ** 2).sum())
    assert found.samples_N.var(ddof=1) == pytest.approx(2 * off, rel=0.1)


@given(st.integers(2, 14), st.integers(0, 10**6))
@settings(max_examples=25)
def test_a_sketch_that_spans_everything_leaves_nothing_to_probe(size: int, seed: int) -> None:
    matrix = symmetric(size, seed)
    found = trace_of(matrix, probes=2, sketch=size + 30)  # some random signs are alike
    assert found.samples_N == pytest.approx(float(matrix.trace()), rel=1e-6, abs=1e-6)


def test_a_sketch_pays_where_few_eigenvalues_hold_the_trace() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))
    values = torch.tensor([100.0, 80.0, 60.0] + [0.1] * 57, dtype=torch.float64)
    matrix = vectors * values @ vectors.T
    plain, sketched = trace_of(matrix, probes=20), trace_of(matrix, probes=8, sketch=6)
    assert plain.products == sketched.products == 20
    assert sketched.standard_error < plain.standard_error / 20


def test_a_matrix_of_low_rank_does_not_fill_the_sketch_with_noise() -> None:
    vector = torch.arange(1.0, 9.0, dtype=torch.float64)
    found = trace_of(torch.outer(vector, vector), probes=2, sketch=4)
    assert found.products == 4 + 1 + 2  # one direction is all there is
    assert found.samples_N == pytest.approx(float(vector @ vector))


@pytest.mark.parametrize("sketch", [0, 4])
def test_forms_add_up_to_the_trace_whatever_the_sketch(sketch: int) -> None:
    found = trace_of(symmetric(9, 5), sketch=sketch)
    assert found.forms_NK.sum(axis=1) == pytest.approx(found.samples_N)


@pytest.mark.parametrize("sketch", [0, 4])
def test_forms_are_right_for_each_part_on_average(sketch: int) -> None:
    # The form of entry i is H_ii on average; 3,000 probes, five standard errors.
    matrix = symmetric(6, 7)
    found = trace_of(matrix, probes=3000, sketch=sketch)
    error = found.forms_NK.std(axis=0, ddof=1) / np.sqrt(3000) + 1e-9
    assert (abs(found.forms_NK.mean(axis=0) - matrix.diagonal().numpy()) < 5 * error).all()


def test_probing_stops_at_the_tolerance_and_not_before_it_can_be_known() -> None:
    nearly = torch.diag(torch.ones(20, dtype=torch.float64)) + 1e-3 * symmetric(20, 1)
    found = trace_of(nearly, tolerance=0.05)
    assert found.reached
    assert len(found.samples_N) == FEWEST
    assert not trace_of(symmetric(20, 1), tolerance=1e-9).reached


def test_one_probe_more_changes_none_of_those_before() -> None:
    matrix = symmetric(8, 2)
    few, more = trace_of(matrix, probes=5), trace_of(matrix, probes=9)
    assert (more.samples_N[:5] == few.samples_N).all()
    assert not (trace_of(matrix, probes=5, seed=1).samples_N == few.samples_N).any()


def test_one_probe_has_no_interval() -> None:
    found = trace_of(symmetric(4, 0), probes=1).interval
    assert (found.low, found.high) == (-np.inf, np.inf)
