"""What another draw of calibration text adds to the intervals of tasks.

Items are marked on the first draw. How a draw moves single items is in the interval over items
already, because each flip counts by itself; what it does to all items alike is not. That part is
taken from the loss: a draw that makes the added loss a tenth larger makes the drop of accuracy, the
flips, and what margins lose about a tenth larger. The share is the standard deviation of one draw,
less what more documents would lessen, over the far end of the added loss, so that damage that
is uncertain or near zero has a share of at most about a half.

Without a second draw of any cell nothing is known, and intervals are over items alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from qaudit.core import statistics
from qaudit.core.items import reach_of_draw
from qaudit.judge.pooling import estimated
from qaudit.judge.table import Cell, Table
from qaudit.types import FULL_PRECISION, Interval


@dataclass(frozen=True)
class DrawShare:
    """The standard deviation of a single draw, as a share of the damage that it does."""

    share: float
    freedom: float

    def reach(self, interval: Interval, confidence: float, origin: float = 0.0) -> float:
        """Return how far a draw may move what is within an interval; `origin` is no damage."""
        far = max(abs(interval.low - origin), abs(interval.high - origin))
        return reach_of_draw(self.share * far, self.freedom, confidence)

    def widened(self, interval: Interval, confidence: float, origin: float = 0.0) -> Interval:
        """Return an interval over items that holds another draw, too."""
        return widened(interval, self.reach(interval, confidence, origin))


def widened(interval: Interval, reach: float) -> Interval:
    """Return an interval that reaches farther, the squares of both added."""
    estimate = interval.estimate
    return replace(
        interval,
        low=estimate - math.hypot(estimate - interval.low, reach),
        high=estimate + math.hypot(interval.high - estimate, reach),
    )


def draw_share(table: Table, cell: Cell) -> DrawShare | None:
    """Return the share of a cell; None where no draw is known, or the scheme has none."""
    result = estimated(table, [cell, (cell[0], FULL_PRECISION)], statistics.excess)
    if result is None or result.draw is None:
        return None
    far = max(abs(result.interval.low), abs(result.interval.high))
    alone = math.sqrt(max(0.0, result.draw**2 - result.together**2) * len(table.draws(*cell)))
    return DrawShare(alone / far, result.freedom) if 0.0 < far < math.inf else None
