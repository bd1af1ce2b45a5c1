"""The ends of spectra that are known, and the same by scipy's restarted Lanczos."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator, eigsh

from qaudit.diagnostics.curvature.lanczos import (
    EigenSearch,
    beside,
    dot,
    find_ends,
    norm,
    power_iteration,
)
from tests.support.problems import symmetric

LIKE = torch.zeros(1, dtype=torch.float64)


def ends_of(matrix_PP: torch.Tensor, **search):
    asked = EigenSearch(**{"steps": len(matrix_PP), "tolerance": 1e-9, **search})
    return find_ends(lambda v: matrix_PP @ v, len(matrix_PP), LIKE, asked)


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


def test_the_largest_are_those_of_scipy() -> None:
    matrix = symmetric(300, 4)
    peer = eigsh(
        LinearOperator((300, 300), matvec=lambda v: matrix.numpy() @ v, dtype=np.float64),
        k=3, which="LA", return_eigenvectors=False,
    )  # fmt: skip
    found = ends_of(matrix, count=3, steps=120, tolerance=1e-6)
    assert found.reached
    assert [e.value for e in found.largest] == pytest.approx(sorted(peer, reverse=True), rel=1e-9)


def test_power_iteration_finds_the_same_where_the_largest_is_also_the_farthest_from_zero() -> None:
    matrix = symmetric(40, 9)
    matrix = matrix @ matrix
    values = np.linalg.eigvalsh(matrix.numpy())
    end, steps, settled = power_iteration(
        lambda v: matrix @ v, 40, LIKE, EigenSearch(steps=3000, tolerance=1e-12)
    )
    assert settled
    assert steps > 2
    assert end.value == pytest.approx(values[-1], rel=1e-6)
    assert ends_of(matrix).largest[0].value == pytest.approx(values[-1], rel=1e-9)


def test_power_iteration_says_when_it_has_not_settled() -> None:
    matrix = torch.diag(torch.tensor([1.0, 0.99999, -1.0], dtype=torch.float64))
    end, steps, settled = power_iteration(
        lambda v: matrix @ v, 3, LIKE, EigenSearch(steps=2, tolerance=0.0)
    )
    assert not settled
    assert steps == 2
    assert end.residual > 0


def test_a_value_that_is_there_several_times_is_found_several_times() -> None:
    found = ends_of(2 * torch.eye(5, dtype=torch.float64), count=3)
    assert [e.value for e in found.largest] == pytest.approx([2, 2, 2])
    assert found.steps == 3


def test_a_matrix_of_zeros_has_ends_of_zero() -> None:
    found = ends_of(torch.zeros(4, 4, dtype=torch.float64), count=2)
    assert [e.value for e in found.largest] == [0.0, 0.0]


def test_single_precision_keeps_the_vectors_apart() -> None:
    # Without reorthogonalization copies of 1000 turn up among the largest.
    values = torch.cat([torch.linspace(0, 1, 400), torch.tensor([1000.0])])
    found = find_ends(
        lambda v: values * v, 401, torch.zeros(1), EigenSearch(count=2, steps=60, tolerance=0.0)
    )
    assert found.largest[0].value == pytest.approx(1000, rel=1e-5)
    assert found.largest[1].value < 1.01


def test_products_that_are_not_numbers_end_the_search() -> None:
    found = find_ends(lambda v: v * math.nan, 4, LIKE, EigenSearch(steps=4))
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
