"""Where full-precision loss stops improving, and three phases where they can be shown.

No detectable improvement is not the absence of improvement. The loss has stopped improving from a
checkpoint on if every later one is better by less than `BARELY` of the loss, with all of its
interval and for all pairs at once. It has not stopped before a checkpoint that a later one beats.
The stretch between the two is returned.
"""

from __future__ import annotations

from collections.abc import Iterator

from qaudit.diagnostics.phases.judge.pairs import Run
from qaudit.types import FULL_PRECISION, Interval, PhaseReading, Span

BARELY = 0.005
"""Of the full-precision loss: half a percent, about what four bits take of a small model."""

FEWEST = 3
"""Checkpoints of a run: fewer show no end of anything."""


def loss_end_of(run: Run) -> tuple[Span | None, str]:
    """Return the stretch in which full-precision loss stops improving, or why there is none."""
    if len(run.thinned) < FEWEST or not run.is_solid:
        return None, "too few checkpoints or documents"
    level = run.level(run.pairs)
    among = run.thinned
    later = [
        [run.loss(FULL_PRECISION, a, b, level) for b in among[k + 1 :]] for k, a in enumerate(among)
    ]
    flat = [
        all(gain.low > -BARELY * run.full_loss(a) for gain in rest)
        for a, rest in zip(among, later, strict=True)
    ]
    ends = next((k for k in range(len(among) - 1) if all(flat[k:])), None)
    if ends is None:
        return None, _why_none(run, later)
    beaten = [k for k, rest in enumerate(later) if any(gain.high < 0 for gain in rest)]
    first = min(ends, max(beaten) + 1) if beaten else 0
    x = run.places.positions
    low, high = among[first], among[ends]
    return Span(x[low], x[high], run.labels[low], run.labels[high]), ""


def _why_none(run: Run, later: list[list[Interval]]) -> str:
    last = run.labels[-1]
    if later[-2][0].high < 0:
        return f"it still improves at the last checkpoint `{last}`"
    return f"whether it improves before `{last}` is inconclusive"


def readings_of(run: Run) -> tuple[PhaseReading, ...]:
    """Return the schemes under which learning, a plateau and divergence are all shown."""
    if len(run.thinned) < FEWEST + 1 or not run.is_solid:
        return ()
    level = run.level(run.pairs * (1 + len(run.schemes)))
    readings = (_reading(run, scheme, level) for scheme in run.schemes)
    return tuple(reading for reading in readings if reading is not None)


def _reading(run: Run, scheme: str, level: float) -> PhaseReading | None:
    """Return the reading with the longest plateau: all pairs hold at once, so none is luck."""
    first, *inner, last = run.thinned
    learned = {k: _both(run, scheme, first, k, level) for k in inner}
    diverged = {k: _both(run, scheme, k, last, level) for k in inner}
    ends = [k for k in inner if diverged[k][1].low > 0 and _is_flat(run, diverged[k][0], k)]
    starts = [k for k in inner if learned[k][0].high < 0 and learned[k][1].high < 0]
    x = run.places.positions
    spans = sorted((x[a] - x[b], a, b) for a in starts for b in ends if a < b)
    for _, plateau, diverging in spans:
        between = _both(run, scheme, plateau, diverging, level)
        if _is_flat(run, between[0], plateau) and _is_less(between[1], diverged[diverging][1]):
            phases = (learned[plateau], between, diverged[diverging])
            loss, error = zip(*phases, strict=True)
            return PhaseReading(scheme, run.labels[plateau], run.labels[diverging], loss, error)
    return None


def _both(run: Run, scheme: str, a: int, b: int, level: float) -> tuple[Interval, Interval]:
    return run.loss(FULL_PRECISION, a, b, level), run.error(scheme, a, b, level)


def _is_flat(run: Run, change: Interval, since: int) -> bool:
    margin = BARELY * run.full_loss(since)
    return -margin < change.low and change.high < margin


def _is_less(change: Interval, growth: Interval) -> bool:
    """Return whether an error moved, either way, by less than it grew afterwards."""
    return max(abs(change.low), abs(change.high)) < growth.low


def error_since(run: Run, start: int, level: float) -> Iterator[tuple[str, Interval]]:
    """Yield by how much each scheme's relative error grew from a checkpoint to the last."""
    for scheme in run.schemes:
        yield scheme, run.error(scheme, start, len(run.labels) - 1, level)
