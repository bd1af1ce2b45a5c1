"""Findings along a course: ship before, stop here, and where the error changes its course.

QA030 and QA031 compare all checkpoints of one run at once, under every scheme. They hold for these
documents and these schemes; neither predicts a longer run or a decay that is still to come.
"""

from __future__ import annotations

from collections.abc import Iterator

from qaudit.diagnostics.phases.judge.run import BARELY, PhaseRun
from qaudit.types import FULL_PRECISION, ChangeRow, Course, Finding, Interval

_UNITS = {"tokens": "tokens", "steps": "steps", "checkpoints in order": "checkpoints"}


def findings_of(run: PhaseRun, course: Course) -> Iterator[Finding]:
    if not run.is_solid:
        return
    yield from _ship_before(run)
    yield from _stop_here(run, course)
    for change in course.changes:
        if change.scheme != FULL_PRECISION:
            yield from _changes(run, course, change)


def _ship_before(run: PhaseRun) -> Iterator[Finding]:
    """QA030: an earlier checkpoint is better quantized, and the last one in full precision."""
    last = len(run.labels) - 1
    level = run.level(2 * last * max(1, len(run.schemes)))
    for scheme in run.schemes:
        rises = [(run.loss(scheme, k, last, level), k) for k in range(last)]
        shown = [(rise, k) for rise, k in rises if rise.low > 0]
        if not shown:
            continue
        rise, best = max(shown, key=lambda pair: pair[0].estimate)
        full = run.loss(FULL_PRECISION, best, last, level)
        before, end = run.labels[best], run.labels[last]
        message = (
            f"at {scheme} `{before}` is better than `{end}`: from there on the quantized loss rose "
            f"by {_nats(rise)} nats per token, while full precision {_moved(full)}"
        )
        hint = f"ship `{before}`, or a soup, where this scheme is what ships"
        yield Finding("QA030", "warn", end, scheme, message, hint, rise, margin=0.0)


def _stop_here(run: PhaseRun, course: Course) -> Iterator[Finding]:
    """QA031: the loss barely improves any more, and the added loss grows."""
    if course.loss_end is None:
        return
    label = course.loss_end.high_label
    start = run.labels.index(label)
    level = run.level(len(run.labels) * max(1, len(run.schemes)))
    for scheme in run.schemes:
        growth = run.error(scheme, start, len(run.labels) - 1, level)
        if growth.low <= 0:
            continue
        message = (
            f"from `{label}` on full-precision loss improves by less than {100 * BARELY:g} %, "
            f"while the added loss at {scheme} grew by {_points(growth)} percentage points"
        )
        hint = (
            "train no further for this scheme; a decay of the learning rate that is still to come "
            "may lower the loss again, and was not measured"
        )
        yield Finding("QA031", "warn", label, scheme, message, hint, growth, margin=0.0)


def _changes(run: PhaseRun, course: Course, change: ChangeRow) -> Iterator[Finding]:
    """QA032: one break fits the course of the error better than smooth curves."""
    if change.verdict != "change" and not change.turns_at_decay:
        return
    place = _place(course, change) if change.at is not None else ""
    if change.turns_at_decay and course.decay is not None:
        at_decay = (
            f"at `{course.decay.low_label}`, where the learning rate starts to fall, it turns "
            f"{_way(change.turn_at_decay)}"
        )
        place = f"{place}; {at_decay}" if place else at_decay
    cell = run.labels[-1], change.scheme
    message = f"the added loss at {change.scheme} changes its course: {place}"
    hint = "a fast smooth rise fits such a course as well: see `docs/phases.md`"
    yield Finding("QA032", "info", *cell, message, hint, change.at, outcome="pass")


def _place(course: Course, change: ChangeRow) -> str:
    at, unit = change.at, _UNITS[course.unit]
    assert at is not None
    names = {"turn": "it turns", "jump": "it jumps", "either": "it turns or jumps"}
    ends = f"[{at.low:,.0f}, {at.high:,.0f}]"
    text = f"{names[change.kind or 'either']} at {at.estimate:,.0f} {ends} {unit}"
    if change.decay is not None:
        text += f", {change.decay} the start of the learning rate's decay"
    if change.loss_end is not None:
        text += f", {change.loss_end} the end of the full-precision loss's improvement"
    return text


def _way(effect: Interval | None) -> str:
    if effect is None or effect.low <= 0 <= effect.high:
        return "(the direction is inconclusive)"
    return "upwards" if effect.low > 0 else "downwards"


def _moved(full: Interval) -> str:
    if full.high < 0:
        return f"gained {_nats(Interval(-full.estimate, -full.high, -full.low))}"
    if full.low > 0:
        return f"rose by {_nats(full)} itself"
    return f"has no detectable change ({_nats(full)})"


def _nats(change: Interval) -> str:
    return f"{change.estimate:.4f} [{change.low:.4f}, {change.high:.4f}]"


def _points(change: Interval) -> str:
    return f"{100 * change.estimate:.2f} [{100 * change.low:.2f}, {100 * change.high:.2f}]"
