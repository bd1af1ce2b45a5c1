"""The means that a course may have without a break, and the breaks that may be added to them.

A break needs two checkpoints on either side: with one, it is indistinguishable from an outlier.
Turns are searched between checkpoints as well, as finely as is affordable. The place of a jump
between two checkpoints is unknown, so its candidate covers all of the gap.

Shapes: N checkpoints, C candidates.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qaudit.core.statistics import Array

BESIDE = 2
MOST_CANDIDATES = 160


class Breaks:
    """Means without a break, and the breaks that may be added, over positions from 0 to 1."""

    def __init__(self, positions_N: Array) -> None:
        self.first, self.extent = positions_N[0], positions_N[-1] - positions_N[0]
        self.x_N = (positions_N - self.first) / self.extent
        self.turns = self._turns()
        self.jumps = (self.x_N[BESIDE - 1 : -BESIDE] + self.x_N[BESIDE : len(self.x_N) - 1]) / 2
        self.jumps = self.jumps[: len(self.x_N) - 2 * BESIDE + 1]
        self.at_C = np.concatenate([self.turns, self.jumps])
        self.is_turn_C = np.arange(len(self.at_C)) < len(self.turns)
        hinges = [np.maximum(0.0, self.x_N - at) for at in self.turns]
        self.shapes_CN = np.array([*hinges, *(self.x_N > at for at in self.jumps)], float)

    def _turns(self) -> Array:
        """Return places between checkpoints as well as on them, as many as are affordable."""
        inner = self.x_N[BESIDE:-BESIDE]
        parts = max(1, min(4, MOST_CANDIDATES // len(self.x_N)))
        steps = np.arange(parts) / parts
        between = (inner[:-1, None] + np.diff(inner)[:, None] * steps).ravel()
        return np.append(between, inner[-1:])

    def hinge(self, position: float) -> Array | None:
        """Return a turn at a position, if enough checkpoints are on either side of it."""
        at = (position - self.first) / self.extent
        beside = min((self.x_N < at).sum(), (self.x_N > at).sum())
        return np.maximum(0.0, self.x_N - at)[None] if beside >= BESIDE else None

    def means(self) -> Iterator[Array]:
        one, x = np.ones_like(self.x_N), self.x_N
        positions = self.first + self.extent * x
        gap = float(np.median(np.diff(positions)))
        log = np.log(positions if self.first > 0 else positions - self.first + gap)
        yield np.stack([one, x], axis=1)
        yield np.stack([one, x, x**2], axis=1)
        yield np.stack([one, x, log], axis=1)
        yield np.stack([one, x, x**2, log], axis=1)

    def width_of(self, candidate: int) -> tuple[float, float]:
        """Return the stretch that a candidate covers: up to its neighbours, or checkpoints."""
        at = float(self.at_C[candidate])
        among = self.turns if self.is_turn_C[candidate] else self.x_N
        before, after = among[among < at], among[among > at]
        return float(before[-1]) if len(before) else at, float(after[0]) if len(after) else at

    def place(self, x: float) -> float:
        """Return a position in the unit of the trajectory."""
        return float(self.first + self.extent * x)
