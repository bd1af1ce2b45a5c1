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
from dataclasses import dataclass, replace

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
class Trace:
    """The samples of a trace."""

    samples_N: Array
    forms_NK: Array
    reached: bool  # the tolerance
    confidence: float

    @property
    def standard_error(self) -> float:
        probes = len(self.samples_N)
        return float(self.samples_N.std(ddof=1)) / math.sqrt(probes) if probes > 1 else math.inf

    @property
    def interval(self) -> Interval:
        """Return the mean with Student's t interval over the probes."""
        mean, probes = float(self.samples_N.mean()), len(self.samples_N)
        if probes < 2 or not math.isfinite(mean):
            return Interval(mean, -math.inf, math.inf)
        reach = float(scipy.special.stdtrit(probes - 1, 0.5 + self.confidence / 2))
        reach *= self.standard_error
        return Interval(mean, mean - reach, mean + reach)


def estimate_trace(
    product: Callable[[Tensor], tuple[Tensor, Array]],
    size: int,
    like: Tensor,
    progress: Progress = lambda done, total: None,
    *,
    probes: int = 30,
    tolerance: float = 0.01,
    seed: int = 0,
    confidence: float = 0.95,
) -> Trace:
    """Estimate a trace, by products with vectors that have the device and dtype of `like`.

    Beside the product Av a function returns forms, v.Bv of other matrices B.
    """
    samples: list[float] = []
    forms: list[Array] = []
    while True:
        # Every probe has a seed of its own, so that one more changes none of those before.
        entropy = np.random.SeedSequence([seed, len(samples), 0])
        probe_P = signs(size, int(entropy.generate_state(1)[0]), like)
        product_P, forms_K = product(probe_P)
        samples.append(dot(probe_P, product_P))
        forms.append(forms_K)
        progress(len(samples), probes)
        trace = Trace(np.array(samples), np.stack(forms), False, confidence)
        limit = tolerance * abs(float(np.mean(samples)))
        if len(samples) >= FEWEST and trace.standard_error <= limit:
            return replace(trace, reached=True)
        if len(samples) >= probes:
            return trace


def signs(size: int, seed: int, like: Tensor) -> Tensor:
    """Draw a vector of signs, each entry 1 or -1: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    drawn_P = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8)
    return drawn_P.to(like.device).to(like.dtype).mul_(2).sub_(1)


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


def find_ends(
    multiply: Multiply,
    size: int,
    like: Tensor,
    progress: Progress = lambda done, total: None,
    *,
    count: int = 1,
    steps: int = 40,
    tolerance: float = 0.01,
    seed: int = 0,
) -> Ends:
    """Find so many of the largest eigenvalues and the smallest one.

    The tolerance is of a residual, as a part of its eigenvalue.
    """
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside_it: list[float] = []
    at_most = min(steps, size)
    vector_P = _fresh(basis, size, like, seed)
    while True:
        basis.append(vector_P)
        image_P = multiply(vector_P)
        diagonal.append(dot(vector_P, image_P))
        progress(len(diagonal), at_most)
        rest_P = beside(image_P, basis)
        length = norm(rest_P)
        ended = length <= _NOTHING * max(map(abs, (*diagonal, *beside_it)))
        following = 0.0 if ended else length
        if not np.isfinite(diagonal).all():
            unknown = Eigenvalue(math.nan, math.inf)
            return Ends((unknown,) * count, unknown, len(diagonal), reached=False)
        # The ends of T, each with its residual: what the next vector has of it.
        values, vectors_SS = scipy.linalg.eigh_tridiagonal(np.array(diagonal), np.array(beside_it))
        residuals = following * np.abs(vectors_SS[-1])
        pairs = [Eigenvalue(float(v), float(r)) for v, r in zip(values, residuals, strict=True)]
        largest = tuple(pairs[::-1][:count])
        close = [end.residual <= tolerance * abs(end.value) for end in largest]
        reached = len(largest) == count and all(close)
        if len(pairs) >= at_most or reached or not math.isfinite(length):
            return Ends(largest, pairs[0], len(pairs), reached)
        beside_it.append(following)
        vector_P = _fresh(basis, size, like, seed) if ended else rest_P / length


def _fresh(basis: list[Tensor], size: int, like: Tensor, seed: int) -> Tensor:
    """Return a random direction that is orthogonal to all before."""
    generator = torch.Generator().manual_seed(seed + len(basis))
    vector_P = beside(torch.randn(size, generator=generator).to(like.device, like.dtype), basis)
    return vector_P / norm(vector_P)


def beside(vector_P: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return the vector without its components along orthonormal others.

    Gram-Schmidt, twice: a single sweep leaves rounding errors along the others as large as what is
    taken away (Giraud, Langou and Rozloznik 2005).
    """
    rest_P = vector_P.clone()
    for _ in range(2):
        for other_P in others:
            rest_P.sub_(other_P, alpha=dot(other_P, rest_P))
    return rest_P


def dot(a_P: Tensor, b_P: Tensor) -> float:
    """Return the inner product, summed in blocks so that a long one loses no digits."""
    total = 0.0
    for a, b in zip(a_P.split(_BLOCK), b_P.split(_BLOCK), strict=True):
        total += float(a.double() @ b.double())
    return total


def norm(a_P: Tensor) -> float:
    return float(dot(a_P, a_P) ** 0.5)
