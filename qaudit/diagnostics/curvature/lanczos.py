"""The ends of the spectrum of a symmetric matrix that is only known by its products.

Lanczos (1950) with full reorthogonalization (`beside`): without it rounding brings back
converged eigenvalues as copies. Every product gives the tridiagonal image T of the
matrix one more row; T's largest eigenvalues (Ritz values) grow towards the matrix's from below,
and with each comes a bound: an eigenvalue is within its residual. Where the Krylov space ends
early, a new random vector goes on, so that a double eigenvalue appears twice.

scipy's `eigsh` does the same on numpy vectors with restarts, and the tests compare with it; here
vectors are as long as a model has parameters, live on the GPU that multiplies them or on the
host beside it, and the steps taken have to be those that were priced. Power iteration is the
plain reference, and needs two vectors where Lanczos needs one for each step.

Shapes: P entries of a vector, S steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy  # its parts load where they are first used

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Multiply = Callable[["Tensor"], "Tensor"]

_NOTHING = 1e-6  # of the largest entry of T: what is left of a vector when the space has ended
_BLOCK = 1 << 20  # entries that are summed in double precision at once


@dataclass(frozen=True)
class Eigenvalue:
    """An eigenvalue of T, and the largest distance to one of the matrix."""

    value: float
    residual: float


@dataclass(frozen=True)
class Ends:
    """The largest eigenvalues, largest first, and the smallest one."""

    largest: tuple[Eigenvalue, ...]
    smallest: Eigenvalue
    steps: int
    reached: bool  # the tolerance, for the largest


@dataclass(frozen=True)
class EigenSearch:
    """The number of eigenvalues, and how much is spent on them."""

    count: int = 1
    steps: int = 40
    tolerance: float = 0.01  # residual as a part of the eigenvalue
    seed: int = 0


def find_ends(
    multiply: Multiply,
    size: int,
    like: Tensor,
    search: EigenSearch,
    keep_on: torch.device | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Ends:
    """Find the ends of a spectrum; vectors have the device and dtype of `like`."""
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside_it: list[float] = []
    at_most = min(search.steps, size)
    vector_P = _fresh(basis, size, like, search.seed)
    while True:
        basis.append(vector_P if keep_on is None else vector_P.to(keep_on))
        image_P = multiply(vector_P)
        diagonal.append(dot(vector_P, image_P))
        progress(len(diagonal), at_most)
        left_P = beside(image_P, basis)
        length = norm(left_P)
        ended = length <= _NOTHING * max(map(abs, (*diagonal, *beside_it)))
        ends = _read(diagonal, beside_it, 0.0 if ended else length, search)
        if ends.steps >= at_most or ends.reached or not math.isfinite(length):
            return ends
        beside_it.append(0.0 if ended else length)
        vector_P = _fresh(basis, size, like, search.seed) if ended else left_P / length


def _fresh(basis: list[Tensor], size: int, like: Tensor, seed: int) -> Tensor:
    """Return a random direction that is orthogonal to all before."""
    import torch

    generator = torch.Generator().manual_seed(seed + len(basis))
    vector_P = beside(torch.randn(size, generator=generator).to(like.device, like.dtype), basis)
    return vector_P / norm(vector_P)


def _read(
    diagonal: list[float], beside_it: list[float], next_one: float, search: EigenSearch
) -> Ends:
    """Return the ends of T, each with its residual: what the next vector has of it."""
    if not np.isfinite(diagonal).all():
        unknown = Eigenvalue(math.nan, math.inf)
        return Ends((unknown,) * search.count, unknown, len(diagonal), reached=False)
    values_S, vectors_SS = scipy.linalg.eigh_tridiagonal(np.array(diagonal), np.array(beside_it))
    residual_S = next_one * np.abs(vectors_SS[-1])
    pairs = [Eigenvalue(float(v), float(r)) for v, r in zip(values_S, residual_S, strict=True)]
    largest = tuple(pairs[::-1][: search.count])
    close = [e.residual <= search.tolerance * abs(e.value) for e in largest]
    return Ends(largest, pairs[0], len(pairs), len(largest) == search.count and all(close))


def power_iteration(
    multiply: Multiply, size: int, like: Tensor, search: EigenSearch
) -> tuple[Eigenvalue, int, bool]:
    """Return the eigenvalue of largest magnitude, the products it took, and if it settled."""
    vector_P = _fresh([], size, like, search.seed)
    value = residual = math.nan
    for step in range(1, search.steps + 1):
        image_P = multiply(vector_P)
        before, value = value, dot(vector_P, image_P)
        length = norm(image_P)
        residual = math.sqrt(max(0.0, length**2 - value**2))
        if length == 0.0 or abs(value - before) <= search.tolerance * abs(value):
            return Eigenvalue(value, residual), step, True
        vector_P = image_P / length
    return Eigenvalue(value, residual), search.steps, False


def beside(vector_P: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return the vector without its components along orthonormal others.

    Gram-Schmidt, twice: a single sweep leaves rounding errors along the others as large as what is
    taken away (Giraud, Langou and Rozloznik 2005). The others may be on another device: they are as
    long as a model has parameters, and there can be dozens of them.
    """
    left_P = vector_P.clone()
    for _ in range(2):
        for other_P in others:
            there_P = other_P.to(left_P.device)
            left_P.sub_(there_P, alpha=dot(there_P, left_P))
    return left_P


def dot(a_P: Tensor, b_P: Tensor) -> float:
    """Return the inner product, summed in blocks so that a long one loses no digits."""
    total = 0.0
    for a, b in zip(a_P.split(_BLOCK), b_P.split(_BLOCK), strict=True):
        total += float(a.double() @ b.double())
    return total


def norm(a_P: Tensor) -> float:
    return float(dot(a_P, a_P) ** 0.5)
