"""The trace of a symmetric matrix that is only known by its products with vectors.

Hutchinson (1990): for a vector v of random signs, v.Hv is the trace on average; its scatter
comes from the entries off the diagonal alone, 2 * the sum of its squares, so that a diagonal
matrix is exact at the first probe. With `sketch` vectors it becomes Hutch++ (Meyer, Musco,
Musco and Woodruff 2021): the trace on the subspace that H maps random signs to is computed
exactly, and only what is left of H is probed. That needs 2 * sketch products more and pays
where few eigenvalues hold most of the trace.

Probing stops when the standard error over the probes has come below a part of the mean, or at
a number of probes. Stopping that depends on the samples makes an interval slightly too narrow, so
not before `FEWEST` probes. The interval is Student's t over the probes, for this H. For intervals
over documents each product also returns `forms`: numbers that are averaged over the probes as v.Hv
is, for example v.H_d v of every document.

Shapes: P entries of a vector, N probes, K forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy  # its parts load where they are first used

from qaudit.core.statistics import Array
from qaudit.diagnostics.curvature.lanczos import beside, dot, norm
from qaudit.types import Interval

if TYPE_CHECKING:
    from torch import Tensor


FEWEST = 8
"""Probes before a tolerance may end the probing."""

_NOTHING = 1e-5  # what is left of a sketched vector beside the others, as a part of it


@dataclass(frozen=True, eq=False)
class Applied:
    """What a matrix makes of a vector v."""

    product_P: Tensor
    forms_K: Array  # v.Av of other matrices A


Product = Callable[["Tensor"], Applied]


@dataclass(frozen=True)
class Probing:
    """How much is spent on a trace."""

    probes: int = 30
    tolerance: float = 0.01
    sketch: int = 0
    seed: int = 0
    confidence: float = 0.95


@dataclass(frozen=True, eq=False)
class Trace:
    """The samples of a trace; the part that a sketch computes exactly is in every sample."""

    samples_N: Array
    forms_NK: Array
    products: int
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
    product: Product,
    size: int,
    like: Tensor,
    probing: Probing,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Trace:
    """Estimate a trace; vectors have the device and dtype of `like`."""
    total = 2 * probing.sketch + probing.probes
    counter = _Counter(product, total, progress)
    basis = _sketched(counter, size, like, probing)
    exact, exact_K = 0.0, np.zeros(0)
    for vector_P in basis:
        applied = counter(vector_P)
        exact += dot(vector_P, applied.product_P)
        exact_K = exact_K + applied.forms_K if exact_K.size else applied.forms_K.copy()
    samples: list[float] = []
    forms: list[Array] = []
    reached = False
    while len(samples) < probing.probes and not reached:
        probe_P = signs(size, _seed(probing.seed, len(samples)), like)
        probe_P = beside(probe_P, basis)
        applied = counter(probe_P)
        samples.append(exact + dot(probe_P, applied.product_P))
        forms.append(exact_K + applied.forms_K if exact_K.size else applied.forms_K)
        reached = _is_enough(np.array(samples), probing.tolerance)
    return Trace(
        np.array(samples), np.stack(forms), counter.products, reached, confidence=probing.confidence
    )


def signs(size: int, seed: int, like: Tensor) -> Tensor:
    """Draw a vector of signs, each entry 1 or -1: the same on every device."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn_P = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8)
    return drawn_P.to(like.device).to(like.dtype).mul_(2).sub_(1)


class _Counter:
    def __init__(self, product: Product, total: int, progress: Callable[[int, int], None]) -> None:
        self._product, self._total, self._progress = product, total, progress
        self.products = 0

    def __call__(self, vector_P: Tensor) -> Applied:
        applied = self._product(vector_P)
        self.products += 1
        self._progress(self.products, self._total)
        return applied


def _sketched(product: Product, size: int, like: Tensor, probing: Probing) -> list[Tensor]:
    basis: list[Tensor] = []
    for k in range(probing.sketch):
        if len(basis) == size:
            break
        image_P = product(signs(size, _seed(probing.seed, k, sketch=True), like)).product_P
        left_P = beside(image_P, basis)
        length = norm(left_P)
        if length > _NOTHING * norm(image_P):  # else it is a sum of those that are there
            basis.append(left_P / length)
    return basis


def _is_enough(samples_N: Array, tolerance: float) -> bool:
    if len(samples_N) < FEWEST:
        return False
    return _standard_error(samples_N) <= tolerance * abs(float(samples_N.mean()))


def _standard_error(samples_N: Array) -> float:
    if len(samples_N) < 2:
        return math.inf
    return float(samples_N.std(ddof=1)) / math.sqrt(len(samples_N))


def _seed(seed: int, probe: int, *, sketch: bool = False) -> int:
    """Give every probe a seed of its own, so that one more changes none of those before."""
    return int(np.random.SeedSequence([seed, probe, int(sketch)]).generate_state(1)[0])
