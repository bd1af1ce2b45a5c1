"""The trace and the ends of the spectrum of a symmetric matrix, from its products with vectors.

**The trace** by Hutchinson (1990): for a vector v of random signs, v.Hv is the trace on average;
its scatter comes from the entries off the diagonal alone, 2 * the sum of their squares, so that a
diagonal matrix is exact at the first probe. Probing stops when the standard error over the probes
has come below a part of the mean, or at a number of probes. Stopping that depends on the samples
makes an interval slightly too narrow, so not before `FEWEST` probes. The interval is Student's t
over the probes, for this H. For intervals over documents each product also returns `forms`:
numbers that are averaged over the probes as v.Hv is, for example v.H_d v of every document.

**The ends** by Lanczos (1950) with full reorthogonalization (`beside`): without it rounding brings
back converged eigenvalues as copies. Every product gives the tridiagonal image T of the matrix one
more row; T's largest eigenvalues (Ritz values) grow towards the matrix's from below, and with each
comes a bound: an eigenvalue is within its residual. Where the Krylov space ends early, a new random
vector goes on, so that a double eigenvalue appears twice. scipy's `eigsh` does the same on numpy
vectors with restarts, and the tests compare with it; here vectors are as long as a model has
parameters, are on the device that multiplies them, and the steps taken have to be those that were
priced.

Shapes: P entries of a vector, N probes, K forms, S steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its parts load where they are first used

from qaudit.core.statistics import Array
from qaudit.support.lazy import Tensor, torch
from qaudit.types import Interval

FEWEST = 8
"""Probes before a tolerance may end the probing."""

Multiply = Callable[["Tensor"], "Tensor"]
Progress = Callable[[int, int], None]

_NOTHING = 1e-6  # of the largest entry of T: what is left of a vector when the space has ended
_BLOCK = 1 << 20  # entries that are summed in double precision at once


# --------------------------------------------------------------------------------------- the trace


@dataclass(frozen=True, eq=False)
class Applied:
    """What a matrix makes of a vector v."""

    product_P: Tensor
    forms_K: Array  # v.Av of other matrices A


@dataclass(frozen=True)
class Probing:
    """How much is spent on a trace."""

    probes: int = 30
    tolerance: float = 0.01
    seed: int = 0
    confidence: float = 0.95


@dataclass(frozen=True, eq=False)
class Trace:
    """The samples of a trace."""

    samples_N: Array
    forms_NK: Array
    reached: bool  # the tolerance
    confidence: float

    @property
    def standard_error(self) -> float:
        return _standard_error(self.samples_N)

    @property
    def interval(self) -> Interval:
        """Return the mean with Student's t interval over the probes."""
        mean, probes = float(self.samples_N.mean()), len(self.samples_N)
        if probes < 2 or not math.isfinite(mean):
            return Interval(mean, -math.inf, math.inf)
        reach = float(scipy.special.stdtrit(probes - 1, 0.5 + self.confidence / 2))
        return Interval(
            mean, mean - reach * self.standard_error, mean + reach * self.standard_error
        )


def estimate_trace(
    product: Callable[[Tensor], Applied],
    size: int,
    like: Tensor,
    probing: Probing,
    progress: Progress = lambda done, total: None,
) -> Trace:
    """Estimate a trace; vectors have the device and dtype of `like`."""
    samples: list[float] = []
    forms: list[Array] = []
    reached = False
    while len(samples) < probing.probes and not reached:
        # Every probe has a seed of its own, so that one more changes none of those before.
        entropy = np.random.SeedSequence([probing.seed, len(samples), 0])
        probe_P = signs(size, int(entropy.generate_state(1)[0]), like)
        applied = product(probe_P)
        samples.append(dot(probe_P, applied.product_P))
        forms.append(applied.forms_K)
        progress(len(samples), probing.probes)
        error = _standard_error(np.array(samples))
        limit = probing.tolerance * abs(float(np.mean(samples)))
        reached = len(samples) >= FEWEST and error <= limit
    return Trace(np.array(samples), np.stack(forms), reached, confidence=probing.confidence)


def signs(size: int, seed: int, like: Tensor) -> Tensor:
    """Draw a vector of signs, each entry 1 or -1: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    drawn_P = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8)
    return drawn_P.to(like.device).to(like.dtype).mul_(2).sub_(1)


def _standard_error(samples_N: Array) -> float:
    if len(samples_N) < 2:
        return math.inf
    return float(samples_N.std(ddof=1)) / math.sqrt(len(samples_N))


# ---------------------------------------------------------------------------------------- its ends


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
    progress: Progress = lambda done, total: None,
) -> Ends:
    """Find the ends of a spectrum; vectors have the device and dtype of `like`."""
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside_it: list[float] = []
    at_most = min(search.steps, size)
    vector_P = _fresh(basis, size, like, search.seed)
    while True:
        basis.append(vector_P)
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


def beside(vector_P: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return the vector without its components along orthonormal others.

    Gram-Schmidt, twice: a single sweep leaves rounding errors along the others as large as what is
    taken away (Giraud, Langou and Rozloznik 2005).
    """
    left_P = vector_P.clone()
    for _ in range(2):
        for other_P in others:
            left_P.sub_(other_P, alpha=dot(other_P, left_P))
    return left_P


def dot(a_P: Tensor, b_P: Tensor) -> float:
    """Return the inner product, summed in blocks so that a long one loses no digits."""
    total = 0.0
    for a, b in zip(a_P.split(_BLOCK), b_P.split(_BLOCK), strict=True):
        total += float(a.double() @ b.double())
    return total


def norm(a_P: Tensor) -> float:
    return float(dot(a_P, a_P) ** 0.5)
