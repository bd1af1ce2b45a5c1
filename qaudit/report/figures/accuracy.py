"""What quantization costs of accuracy on tasks, along the series."""

from __future__ import annotations

from functools import cached_property

from qaudit.report.figures.drawing import Drawing
from qaudit.report.figures.trajectory import Quantity, trajectory
from qaudit.report.views import View
from qaudit.types import Interval

_QUANTITY = Quantity(
    "accuracy",
    "What quantization costs of accuracy on tasks, along the series",
    "accuracy lost, % of what full precision gets wrong",
)


class _Accuracy(View):
    """An audit whose errors are drops of accuracy: of the mean over tasks, or the only task."""

    @cached_property
    def _drops(self) -> dict[tuple[str, str], Interval | None]:
        return {(row.subject, row.scheme): row.accuracy_drop for row in self.audit.tasks}

    @property
    def unit(self) -> str:
        return "item"

    def error(self, subject: str, scheme: str) -> Interval | None:
        return self._drops.get((subject, scheme))


def accuracy(view: View, alt: str) -> Drawing:
    """Draw the drop of accuracy of every subject under every scheme."""
    return trajectory(_Accuracy(view.audit), alt, _QUANTITY)
