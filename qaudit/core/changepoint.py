"""Find where a trajectory changes its course, with an interval, or no detectable change.

A trajectory is a quantity at every checkpoint of a run, all measured on the same documents. Three
things move it besides its course: the documents, which move all checkpoints together; whatever is
particular to each checkpoint and its quantization; and smooth bends, which are no change point.

- Documents are resampled and the whole trajectory is recomputed from each sample, so that what
  they move together stays together: S is the covariance of these samples, never a diagonal.
- What is particular to a checkpoint is one unknown variance t for all of them. The model is
  y ~ N(mean, S + t I), t by maximum likelihood on a grid, anew for every hypothesis and sample.
- A break is a turn (continuous, the slope changes) or a jump (the slope stays), with at least two
  checkpoints on either side. It has to do better than a straight line, and better than smooth
  curves (1, x, x^2; 1, x, log x; their union). The statistic is the largest likelihood ratio over
  all breaks, computed from the contrasts that the smooth mean leaves free, and its distribution
  comes from the same search in series without a break: resampled documents and normal scatter of
  the estimated variance. The largest of the probabilities counts (Berger 1982).
- The interval inverts the likelihood ratio: every place that the data do not refuse, of either
  kind of break, with the critical value simulated at the estimate. It holds the doubt about
  the kind, and is the hull of a set that may have gaps.

Given up: sup-F tables, which know neither shared documents nor a dozen points; more
than one break, for which few series have the points; scatter that one checkpoint hands to the
next. `benchmarks/changepoint.py` shows how often it errs and what it finds.

Shapes: N checkpoints, D documents, B samples, C candidates, M contrasts, K sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from qaudit.core.statistics import Array, Statistic
from qaudit.types import Interval

MINIMUM_POINTS = 8
"""With fewer checkpoints no break is searched: a turn that doubles would not be detected."""

SAMPLES = 1999
VARIANCES = 14
BESIDE = 2
MOST_CANDIDATES = 160

Kind = Literal["turn", "jump"]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A quantity along a course, and what each sample of documents makes of it."""

    positions_N: Array
    values_N: Array
    moved_BN: Array  # by a sample of documents, from `values_N`


@dataclass(frozen=True)
class Break:
    """A change point. `effect` is a change of slope per unit of position, or a jump."""

    kind: Kind  # the likelier one
    certain: bool  # the other kind is refused all over
    at: Interval
    effect: Interval


@dataclass(frozen=True)
class FittedCourse:
    """How well means without a break fit a trajectory, and the break that fits it best."""

    against_line: float  # probability of such a likelihood ratio along a straight line
    against_curve: float  # the same along the smooth curve that fits the change least badly
    best: Break
    scatter: float  # standard deviation of what is particular to a checkpoint


class Breaks:
    """Means without a break, and the breaks that may be added, over positions from 0 to 1.

    A break needs two checkpoints on either side: with one, it is indistinguishable from an outlier.
    Turns are searched between checkpoints as well, as finely as is affordable. The place of a jump
    between two checkpoints is unknown, so its candidate covers all of the gap.
    """

    def __init__(self, positions_N: Array) -> None:
        self.first, self.extent = positions_N[0], positions_N[-1] - positions_N[0]
        self.x_N = (positions_N - self.first) / self.extent
        # Places between checkpoints as well as on them, as many as are affordable.
        inner = self.x_N[BESIDE:-BESIDE]
        parts = max(1, min(4, MOST_CANDIDATES // len(self.x_N)))
        steps = np.arange(parts) / parts
        between = (inner[:-1, None] + np.diff(inner)[:, None] * steps).ravel()
        self.turns = np.append(between, inner[-1:])
        self.jumps = (self.x_N[BESIDE - 1 : -BESIDE] + self.x_N[BESIDE : len(self.x_N) - 1]) / 2
        self.jumps = self.jumps[: len(self.x_N) - 2 * BESIDE + 1]
        self.at_C = np.concatenate([self.turns, self.jumps])
        self.is_turn_C = np.arange(len(self.at_C)) < len(self.turns)
        hinges = [np.maximum(0.0, self.x_N - at) for at in self.turns]
        self.shapes_CN = np.array([*hinges, *(self.x_N > at for at in self.jumps)], float)

    def means(self) -> Iterator[Array]:
        ones, x = np.ones_like(self.x_N), self.x_N
        positions = self.first + self.extent * x
        gap = float(np.median(np.diff(positions)))
        log = np.log(positions if self.first > 0 else positions - self.first + gap)
        yield np.stack([ones, x], axis=1)
        yield np.stack([ones, x, x**2], axis=1)
        yield np.stack([ones, x, log], axis=1)
        yield np.stack([ones, x, x**2, log], axis=1)

    def width_of(self, candidate: int) -> tuple[float, float]:
        """Return the stretch that a candidate covers: up to its neighbours, or checkpoints."""
        at = float(self.at_C[candidate])
        among = self.turns if self.is_turn_C[candidate] else self.x_N
        before, after = among[among < at], among[among > at]
        return float(before[-1]) if len(before) else at, float(after[0]) if len(after) else at


def trajectory(
    positions: npt.ArrayLike,
    sums_KND: Array,
    statistic: Statistic,
    *,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Trajectory:
    """Return a statistic of every checkpoint's sums, recomputed for each sample of documents."""
    documents = sums_KND.shape[2]
    draw = np.random.default_rng(seed)
    times_BD = draw.multinomial(documents, np.full(documents, 1 / documents), samples)
    values_N = statistic(sums_KND.sum(axis=2))
    sampled_NB = statistic(sums_KND @ times_BD.T.astype(np.float64))
    wide = (documents / (documents - 1)) ** 0.5 * (1 + 1 / documents)  # few documents know less
    moved_BN = wide * (sampled_NB - values_N[:, None]).T
    return Trajectory(np.asarray(positions, np.float64), values_N, moved_BN)


@dataclass(frozen=True, eq=False)
class _Contrasts:
    """What a smooth mean leaves free, turned so that documents move each contrast by itself."""

    basis_NM: Array
    documents_M: Array  # variances
    shapes_CM: Array
    variances: Array

    @classmethod
    def of(cls, mean_NP: Array, shapes_CN: Array, series: Trajectory) -> _Contrasts:
        free_NM = np.linalg.svd(mean_NP)[0][:, mean_NP.shape[1] :]
        moved_BM = series.moved_BN @ free_NM
        spread_M, turn_MM = np.linalg.eigh(moved_BM.T @ moved_BM / len(moved_BM))
        basis_NM = free_NM @ turn_MM
        power = float(np.mean((series.values_N @ basis_NM) ** 2))
        mean_spread = float(spread_M.mean())
        top = max(4 * power, mean_spread, np.finfo(float).tiny)
        low = max(mean_spread, 1e-6 * top) / 100
        grid = np.concatenate([[0.0], np.geomspace(low, top, VARIANCES)])
        # Few documents make the smallest variances smaller than they are.
        shrunk_M = np.maximum(spread_M, max(0.05 * mean_spread, 1e-9 * top))
        return cls(basis_NM, shrunk_M, shapes_CN @ basis_NM, grid)

    @property
    def weights(self) -> tuple[Array, ...]:
        return tuple(1 / (self.documents_M + t) for t in self.variances)

    def without(self, seen_BM: Array) -> Array:
        """Return the log-likelihood of no break under each variance, (variances, B)."""
        return np.stack([0.5 * (np.log(w).sum() - seen_BM**2 @ w) for w in self.weights])

    def gains(self, seen_BM: Array, w_M: Array) -> Array:
        """Return the gain in log-likelihood of each candidate under one variance, (C, B)."""
        fit_CB = (self.shapes_CM * w_M) @ seen_BM.T
        size_C = self.shapes_CM**2 @ w_M
        return np.divide(0.5 * fit_CB**2, np.maximum(size_C, np.finfo(float).tiny)[:, None])

    def noise(self, series: Trajectory, likelihood_T: Array, draw: np.random.Generator) -> Array:
        """Return samples of documents with scatter of a variance as likely as each is, (B, M)."""
        chances_T = np.exp(likelihood_T - likelihood_T.max())
        samples_BM: Array = series.moved_BN @ self.basis_NM
        variance_B = draw.choice(self.variances, len(samples_BM), p=chances_T / chances_T.sum())
        return samples_BM + variance_B[:, None] ** 0.5 * draw.standard_normal(samples_BM.shape)

    def with_each(self, seen_BM: Array) -> Array:
        """Return the log-likelihood of each candidate, its variance the best for it, (C, B)."""
        best_CB = np.full((len(self.shapes_CM), len(seen_BM)), -np.inf)
        for w_M, none_B in zip(self.weights, self.without(seen_BM), strict=True):
            np.maximum(best_CB, self.gains(seen_BM, w_M) + none_B, out=best_CB)
        return best_CB


def _against(line: _Contrasts, series: Trajectory, draw: np.random.Generator) -> float:
    """Return how probable such a likelihood ratio is where there is no break."""
    seen_1M = (series.values_N @ line.basis_NM)[None]
    none = line.without(seen_1M)
    samples_BM = line.noise(series, none[:, 0], draw)
    ratio = float(line.with_each(seen_1M).max() - none.max())
    ratios_B = line.with_each(samples_BM).max(axis=0) - line.without(samples_BM).max(axis=0)
    return float(1 + (ratios_B >= ratio).sum()) / (1 + len(ratios_B))


def find_break(series: Trajectory, confidence: float = 0.95, *, seed: int = 1) -> FittedCourse:
    """Search a trajectory of at least `MINIMUM_POINTS` for its break, and judge it."""
    if len(series.values_N) < MINIMUM_POINTS:
        raise ValueError(f"{len(series.values_N)} points are too few")
    draw = np.random.default_rng(seed)
    places = Breaks(series.positions_N)
    line, *curves = (_Contrasts.of(mean, places.shapes_CN, series) for mean in places.means())
    straight = _against(line, series, draw)
    bent = max(_against(curve, series, draw) for curve in curves)
    seen_1M = (series.values_N @ line.basis_NM)[None]
    each_C = line.with_each(seen_1M)[:, 0]
    best = int(each_C.argmax())
    none_T = line.without(seen_1M)[:, 0]
    gains_T = [line.gains(seen_1M, w)[best, 0] for w in line.weights]
    likelihood_T = none_T + gains_T
    which = int(likelihood_T.argmax())
    w_M = line.weights[which]

    def sizes_of(candidate: int, seen_BM: Array) -> Array:
        shape_M = line.shapes_CM[candidate]
        size_B: Array = seen_BM @ (w_M * shape_M) / float(shape_M**2 @ w_M)
        return size_B

    effect = float(sizes_of(best, seen_1M)[0])
    sampled_BM = effect * line.shapes_CM[best] + line.noise(series, likelihood_T, draw)
    each_CB = line.with_each(sampled_BM)
    limit = float(np.quantile(each_CB.max(axis=0) - each_CB[best], confidence))
    kept_C = each_C >= each_C[best] - limit
    ends = [places.width_of(int(candidate)) for candidate in np.flatnonzero(kept_C)]
    at = (float(places.at_C[best]), min(low for low, _ in ends), max(high for _, high in ends))
    turn = bool(places.is_turn_C[best])
    # The size of each sample's own best break of the kind.
    same_CB = np.where((places.is_turn_C == turn)[:, None], each_CB, -np.inf)
    best_B = same_CB.argmax(axis=0)
    effects_B = np.empty(len(best_B))
    for candidate in np.unique(best_B):
        mine = best_B == candidate
        effects_B[mine] = sizes_of(int(candidate), sampled_BM[mine])
    quantiles = np.quantile(effects_B, [0.5 - confidence / 2, 0.5 + confidence / 2])
    low, high = map(float, quantiles)
    unit = float(1 / places.extent) if turn else 1.0
    certain = len(set(places.is_turn_C[kept_C].tolist())) == 1
    size = Interval(unit * effect, unit * min(low, effect), unit * max(high, effect))
    at_positions = Interval(*(float(places.first + places.extent * x) for x in at))
    best_break = Break("turn" if turn else "jump", certain, at_positions, size)
    return FittedCourse(
        straight, max(straight, bent), best_break, float(line.variances[which]) ** 0.5
    )
