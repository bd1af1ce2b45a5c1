"""Counts of zeros; the only part that reads weights."""

from dataclasses import dataclass

from qaudit.diagnostics.case import Measure


@dataclass(frozen=True)
class ZeroRow:
    """The zeros of a subject."""

    subject: str
    zeros: int


def measure_zeros(case):
    weights = case.weights()
    zeros = sum(int((weights.read(name) == 0).sum()) for name in weights.names())
    return [ZeroRow(case.subject.label, zeros)]


MEASURE = Measure(measure_zeros)
