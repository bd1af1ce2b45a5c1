"""Traces and ends of spectra that are known, and the same by scipy's restarted Lanczos."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qaudit.core.spectrum import (
    FEWEST,
    beside,
    dot,
    estimate_trace,
    find_ends,
    norm,
)
from tests.support.problems import symmetric

LIKE = torch.zeros(1, dtype=torch.float64)


def times(matrix_PP: torch.Tensor):
    def product(vector_P):
        image_P = matrix_PP @ vector_P
        return image_P, (vector_P * image_P).numpy()

    return product


def trace_of(matrix_PP, **probing):
    given = {"tolerance": 0.0, "probes": 40, **probing}
    return estimate_trace(times(matrix_PP), len(matrix_PP), LIKE, **given)


@given(st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=40)
def test_a_diagonal_matrix_is_exact_at_every_probe(size: int, seed: int) -> None:
    diagonal = torch.diag(symmetric(size, seed).diagonal())
    found = trace_of(diagonal, probes=3)
    assert found.samples_N == pytest.approx(float(diagonal.trace()), rel=1e-9, abs=1e-9)


def test_the_interval_holds_the_trace_as_often_as_it_says() -> None:
    # 300 matrices at 90 %: 30 misses, give or take 5.2. A right interval is outside of these
    # bounds about once in 2,000 seeds, and the seeds are fixed.
    missed = 0
    for seed in range(300):
        matrix = symmetric(12, seed)
        found = trace_of(matrix, probes=20, seed=seed, confidence=0.9).interval
        missed += not found.low <= float(matrix.trace()) <= found.high
    assert 12 <= missed <= 52


def test_probes_scatter_as_much_as_the_theory_says() -> None:
    # Var(v.Hv) = 2 * the sum of squares off the diagonal; 4,000 probes know it to about 2 %.
    matrix = symmetric(10, 3)
    found = trace_of(matrix, probes=4000)
    off = float((matrix**2).sum() - (matrix.diagonal() ** 2).sum())
    assert found.samples_N.var(ddof=1) == pytest.approx(2 * off, rel=0.1)


def test_forms_add_up_to_the_trace() -> None:
    found = trace_of(symmetric(9, 5))
    assert found.forms_NK.sum(axis=1) == pytest.approx(found.samples_N)


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


def ends_of(matrix_PP: torch.Tensor, **search):
    given = {"steps": len(matrix_PP), "tolerance": 1e-9, **search}
    return find_ends(lambda v: matrix_PP @ v, len(matrix_PP), LIKE, **given)


@given(st.integers(1, 25), st.integers(0, 10**6))
def test_all_steps_find_both_ends_exactly(size: int, seed: int) -> None:
    matrix = symmetric(size, seed)
    values = np.linalg.eigvalsh(matrix.numpy())
    found = ends_of(matrix, count=min(3, size), tolerance=0.0)
    assert [e.value for e in found.largest] == pytest.approx(values[::-1][:3], rel=1e-8, abs=1e-8)
    assert found.smallest.value == pytest.approx(values[0], rel=1e-8, abs=1e-8)


@given(st.integers(2, 40), st.integers(2, 10), st.integers(0, 10**6))
def test_an_eigenvalue_lies_within_each_residual_after_any_number_of_steps(
    size: int, steps: int, seed: int
) -> None:
    matrix = symmetric(size, seed)
    values = np.linalg.eigvalsh(matrix.numpy())
    found = ends_of(matrix, steps=steps, count=2)
    for end in (*found.largest, found.smallest):
        assert abs(values - end.value).min() <= end.residual + 1e-9
        assert values[0] - 1e-9 <= end.value <= values[-1] + 1e-9


def test_a_matrix_of_zeros_has_ends_of_zero() -> None:
    found = ends_of(torch.zeros(4, 4, dtype=torch.float64), count=2)
    assert [e.value for e in found.largest] == [0.0, 0.0]


def test_single_precision_keeps_the_vectors_apart() -> None:
    # Without reorthogonalization copies of 1000 turn up among the largest.
    values = torch.cat([torch.linspace(0, 1, 400), torch.tensor([1000.0])])
    found = find_ends(lambda v: values * v, 401, torch.zeros(1), count=2, steps=60, tolerance=0.0)
    assert found.largest[0].value == pytest.approx(1000, rel=1e-5)
    assert found.largest[1].value < 1.01


def test_products_that_are_not_numbers_end_the_search() -> None:
    found = find_ends(lambda v: v * math.nan, 4, LIKE, steps=4)
    assert found.steps == 1
    assert not found.reached
    assert math.isnan(found.largest[0].value)


def test_what_is_left_beside_others_is_orthogonal_to_them_in_single_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    others: list[torch.Tensor] = []
    common = torch.randn(500, generator=generator)
    for _ in range(6):  # nearly parallel: one sweep would leave much of them
        left = beside(common + 1e-3 * torch.randn(500, generator=generator), others)
        others.append(left / norm(left))
    gram = np.array([[dot(a, b) for a in others] for b in others])
    assert abs(gram - np.eye(6)).max() < 1e-5
