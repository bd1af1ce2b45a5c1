"""A small predictor along a series, held against two that know nothing.

Ridge regression on a few standardized signals (tokens, learning rate, whatever is known at every
point), which shrinks where points are few. What it is worth is its error at points that were left
out, the penalty chosen anew without them; beside it stand the mean of the others and the value
between the two neighbours. Unless it is better than both by a tenth it is not used, and the
better of the two is. An interval is as wide as errors at left-out points were.

Given up: Gaussian processes, whose length scales ten points do not tell, and more terms, which
ten points fit by luck. Neighbours further apart than those that were left out are worse than
their interval says, and so is every point beyond the last one.

Shapes: N points, F signals, M new points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy  # its parts load where they are first used

from qaudit.core.statistics import Array
from qaudit.types.conclusions import Method

MINIMUM_POINTS = 6
"""With fewer points nothing is predicted: what is left out is too much of what is known."""

BETTER = 0.9
"""The predictor is used where its error at left-out points is below this part of the others'."""

PENALTIES = tuple(float(p) for p in np.geomspace(0.01, 100, 9))


@dataclass(frozen=True, eq=False)
class Known:
    """Values at positions, with signals (N, F)."""

    positions_N: Array
    signals_NF: Array
    values_N: Array


@dataclass(frozen=True, eq=False)
class Predicted:
    """New values and their standard errors, how they were made, and what that was worth."""

    values_M: Array
    errors_M: Array
    method: Method
    left_out: dict[Method, float]  # root mean square error at left-out points
    freedom: int

    def reach(self, confidence: float) -> float:
        return float(scipy.special.stdtrit(self.freedom, 0.5 + confidence / 2))

    def below(self, level: float) -> Array:
        """Return the probability of each new value to lie below a level."""
        return np.asarray(
            scipy.special.stdtr(self.freedom, (level - self.values_M) / self.errors_M)
        )

    def gains(self, level: float) -> Array:
        """Return by how much each new value is expected to go below a level."""
        t_M, nu = (level - self.values_M) / self.errors_M, self.freedom
        size = math.exp(scipy.special.gammaln((nu + 1) / 2) - scipy.special.gammaln(nu / 2))
        density_M = size / math.sqrt(nu * math.pi) * (1 + t_M**2 / nu) ** (-(nu + 1) / 2)
        tail_M = density_M * (nu + t_M**2) / (nu - 1)
        gained_M = self.errors_M * (t_M * scipy.special.stdtr(nu, t_M) + tail_M)
        return np.asarray(np.maximum(gained_M, 0.0))


def predict(known: Known, positions_M: Array, signals_MF: Array) -> Predicted:
    """Predict values at new points by whatever was best at points left out."""
    points = len(known.values_N)
    if points < MINIMUM_POINTS:
        raise ValueError(f"{points} points are too few")
    left_out = {name: _size(residuals) for name, residuals in _left_out(known).items()}
    method: Method = "neighbours" if left_out["neighbours"] < left_out["mean"] else "mean"
    if left_out["signals"] < BETTER * left_out[method]:
        method = "signals"
    freedom = max(3, points - 2)  # t has a variance only beyond two degrees of freedom
    wider_M = np.full(len(positions_M), 1 + 1 / points)
    if method == "signals":
        values_M, wider_M = _ridge(known, signals_MF)
    elif method == "neighbours":
        values_M = between(known.positions_N, known.values_N, positions_M)
    else:
        values_M = np.full(len(positions_M), known.values_N.mean())
    error = max(left_out[method], 1e-12 * float(np.abs(known.values_N).max()), 1e-300)
    return Predicted(values_M, error * np.sqrt(wider_M), method, left_out, freedom)


def _size(residuals_N: Array) -> float:
    return math.sqrt(float((residuals_N**2).mean()))


def _left_out(known: Known) -> dict[Method, Array]:
    x, y, n = known.positions_N, known.values_N, len(known.values_N)
    rows = [np.delete(np.arange(n), k) for k in range(n)]
    signals = [
        _ridge(Known(x[r], known.signals_NF[r], y[r]), known.signals_NF[k : k + 1])[0][0]
        for k, r in enumerate(rows)
    ]
    nearby = [between(x[r], y[r], x[k : k + 1])[0] for k, r in enumerate(rows)]
    return {
        "signals": y - np.array(signals),
        "neighbours": y - np.array(nearby),
        "mean": (y - y.mean()) * n / (n - 1),
    }


def between(positions_N: Array, values_N: Array, at_M: Array) -> Array:
    """Return values on the line between neighbours; beyond the ends, that of the last one."""
    places, which = np.unique(positions_N, return_inverse=True)
    means = np.bincount(which, values_N) / np.bincount(which)
    return np.asarray(np.interp(at_M, places, means))


def _ridge(known: Known, signals_MF: Array) -> tuple[Array, Array]:
    """Return predictions, and by how much of the noise each is more uncertain (its leverage)."""
    middle_F, spread_F = known.signals_NF.mean(axis=0), known.signals_NF.std(axis=0)
    spread_F = np.where(spread_F > 0, spread_F, 1.0)
    x_NF, new_MF = ((s - middle_F) / spread_F for s in (known.signals_NF, signals_MF))
    y, n = known.values_N, len(known.values_N)
    best = min(PENALTIES, key=lambda penalty: _size(leave_one_out(x_NF, y, penalty)))
    inverse_FF = np.linalg.inv(x_NF.T @ x_NF + best * np.eye(x_NF.shape[1]))
    values_M = y.mean() + new_MF @ (inverse_FF @ (x_NF.T @ (y - y.mean())))
    leverage_M = 1 / n + ((new_MF @ inverse_FF) * new_MF).sum(axis=1)
    return values_M, 1 + leverage_M


def leave_one_out(x_NF: Array, y_N: Array, penalty: float) -> Array:
    """Return ridge's residual at each point when that point is left out, in closed form.

    The intercept is not penalized and the scale of `x_NF` stays as it is.
    """
    n, signals = x_NF.shape
    full = np.column_stack([np.ones(n), x_NF])
    punished = np.diag([0.0, *[penalty] * signals])
    hat = full @ np.linalg.solve(full.T @ full + punished, full.T)
    return np.asarray((y_N - hat @ y_N) / np.maximum(1e-12, 1 - np.diag(hat)))
