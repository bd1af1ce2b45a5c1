"""The runs of an audit along their course: change points, the end of improvement, advice.

Every statement is about one run in training order (`core.course`) and has an interval or a
probability that holds for all schemes at once. None is about causes: what changes along a run
changes together, and one run is one observation.

All pairs of a question are compared at once. Choosing the pair that shows most is then no luck:
the intervals of all pairs hold together (Bonferroni), including those that are not shown. No
detectable improvement is not the absence of improvement: the loss has stopped improving from a
checkpoint on if every later one is better by less than `BARELY` of the loss, with all of its
interval, and it has not stopped before a checkpoint that a later one beats.

QA030 and QA031 compare all checkpoints of one run at once, under every scheme. They hold for these
documents and these schemes; neither predicts a longer run or a decay still to come.

The section `Phases` says where the course of the longest run changes; the others are in
`audit.json`. What cannot be decided is listed with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from qaudit.core import statistics
from qaudit.core.changepoint import MINIMUM_POINTS, find_break, trajectory
from qaudit.core.course import Places
from qaudit.core.course import courses as runs_in
from qaudit.judge.table import Measurements, columns_of, interval_of
from qaudit.report import document as doc
from qaudit.report.format import NOT_FINITE, count, listing, percent, plural, spread
from qaudit.report.views import View
from qaudit.types import (
    FULL_PRECISION,
    ChangeRow,
    Checkpoint,
    Course,
    Diagnostics,
    Finding,
    Interval,
    Span,
    Where,
)

MOST = 32
"""Of a longer run so many checkpoints are compared in pairs, spread evenly, its ends among them."""

BARELY = 0.005
"""Of the full-precision loss: half a percent, about what four bits take of a small model."""

FEWEST = 3
"""Checkpoints of a run: fewer show no end of anything."""


@dataclass(frozen=True, eq=False)
class PhaseRun:
    """One run's checkpoints, their places, and the measurements of the whole audit."""

    table: Measurements
    checkpoints: list[Checkpoint]
    places: Places

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(c.label for c in self.checkpoints)

    @cached_property
    def schemes(self) -> tuple[str, ...]:
        """Quantized schemes under which every checkpoint of the run has a finite loss."""
        return tuple(s for s in self.table.quantized_schemes if self.is_measured(s))

    def is_measured(self, scheme: str) -> bool:
        cells = [(label, which) for label in self.labels for which in (scheme, FULL_PRECISION)]
        return columns_of(self.table, cells) is not None

    @property
    def is_solid(self) -> bool:
        """Whether there are enough documents for a verdict."""
        return self.table.documents >= statistics.MINIMUM_DOCUMENTS

    def level(self, at_once: int) -> float:
        return statistics.simultaneous(self.table.confidence, at_once)

    def span(self, low: int, high: int) -> Span:
        x = self.places.positions
        return Span(x[low], x[high], self.labels[low], self.labels[high])

    def interval(
        self, cells: Sequence[tuple[int, str]], statistic: statistics.Statistic, level: float
    ) -> Interval:
        """Return an interval over documents; cells are checkpoints by place, each with a scheme."""
        labelled = [(self.labels[k], scheme) for k, scheme in cells]
        interval = interval_of(self.table, labelled, statistic, confidence=level)
        return interval or statistics.UNKNOWN

    def loss(self, scheme: str, a: int, b: int, level: float) -> Interval:
        """Return the loss at b minus the loss at a, in nats per token."""
        return self.interval([(b, scheme), (a, scheme)], statistics.change, level)


def decay_of(run: PhaseRun) -> tuple[Span | None, str]:
    """Return the stretch in which the rate leaves its peak for good, or why there is none.

    The start is between the last checkpoint at the peak and the one after it.
    """
    rates = [c.learning_rate for c in run.checkpoints]
    if any(rate is None for rate in rates):
        return None, "the learning rate is not known at every checkpoint"
    numbers = [rate or 0.0 for rate in rates]
    peak = max(numbers)
    at_peak = [k for k, rate in enumerate(numbers) if math.isclose(rate, peak, rel_tol=1e-6)]
    if at_peak[-1] == len(numbers) - 1:
        return None, "the learning rate does not fall before the last checkpoint"
    if at_peak == [0]:
        return None, "the learning rate falls from the first checkpoint on, or before it"
    return run.span(at_peak[-1], at_peak[-1] + 1), ""


def loss_end_of(run: PhaseRun) -> tuple[Span | None, str]:
    """Return the stretch in which full-precision loss stops improving, or why there is none."""
    last = len(run.labels) - 1
    among: Sequence[int] = range(last + 1)
    if last >= MOST:
        among = sorted({round(k * last / (MOST - 1)) for k in range(MOST)})
    if len(among) < FEWEST or not run.is_solid:
        return None, "too few checkpoints or documents"
    level = run.level(len(among) * (len(among) - 1) // 2)
    later = [
        [run.loss(FULL_PRECISION, a, b, level) for b in among[k + 1 :]] for k, a in enumerate(among)
    ]
    losses = [
        run.interval([(a, FULL_PRECISION)], statistics.per_token, level).estimate for a in among
    ]
    flat = [
        all(gain.low > -BARELY * full for gain in rest)
        for full, rest in zip(losses, later, strict=True)
    ]
    ends = next((k for k in range(len(among) - 1) if all(flat[k:])), None)
    if ends is None and later[-2][0].high < 0:
        return None, f"it still improves at the last checkpoint `{run.labels[-1]}`"
    if ends is None:
        return None, f"whether it improves before `{run.labels[-1]}` is inconclusive"
    beaten = [k for k, rest in enumerate(later) if any(gain.high < 0 for gain in rest)]
    first = min(ends, max(beaten) + 1) if beaten else 0
    return run.span(among[first], among[ends]), ""


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    """Return the diagnostics with the table `phases`, and the findings QA030 to QA032."""
    single = [s.first for s in table.subjects if s.kind == "checkpoint"]
    runs = [
        PhaseRun(table, checkpoints, places)
        for checkpoints, places in runs_in(
            [c for c in single if table.find(c.label, FULL_PRECISION)]
        )
        if len(checkpoints) > 1
    ]
    searched = max(1, sum(len(run.labels) >= MINIMUM_POINTS for run in runs))
    courses: list[Course] = []
    findings: list[Finding] = []
    for run in runs:
        decay, decay_reason = decay_of(run)
        loss_end, loss_end_reason = loss_end_of(run)
        course = Course(
            run=f"{run.labels[0]} to {run.labels[-1]}",
            unit=run.places.unit,
            checkpoints=run.labels,
            positions=run.places.positions,
            confidence=run.table.confidence,
            decay=decay,
            decay_reason=decay_reason,
            loss_end=loss_end,
            loss_end_reason=loss_end_reason,
            changes=changes_of(run, decay, loss_end, searched),
        )
        courses.append(course)
        findings += (*_ship_before(run), *_along(run, course)) if run.is_solid else ()
    return replace(diagnostics, phases=tuple(courses)), tuple(findings)


def changes_of(
    run: PhaseRun, decay: Span | None, loss_end: Span | None, runs: int = 1
) -> tuple[ChangeRow, ...]:
    """Return a row for the loss and for each scheme of the audit, which has so many runs."""
    level = run.level(runs * max(1, len(run.schemes)))
    points, documents = len(run.labels), run.table.documents
    rows = []
    for scheme in (FULL_PRECISION, *run.table.quantized_schemes):
        reason = ""
        if points < MINIMUM_POINTS:
            reason = f"{points} checkpoints, and it takes {MINIMUM_POINTS}"
        elif not run.is_solid:
            reason = f"{documents} documents, and it takes {statistics.MINIMUM_DOCUMENTS}"
        elif not run.is_measured(scheme):
            reason = "not every checkpoint of the run has a finite loss under it"
        if reason:
            rows.append(ChangeRow(scheme, "unknown", reason, points))
            continue
        # Of a scheme and full precision, or of full precision and tokens.
        is_full = scheme == FULL_PRECISION
        statistic = statistics.per_token if is_full else statistics.excess
        sums = []
        for label in run.labels:
            cells = [(label, scheme)] if is_full else [(label, scheme), (label, FULL_PRECISION)]
            columns = columns_of(run.table, cells)
            assert columns is not None  # a run with a loss that is not finite was refused
            sums.append(np.stack(columns[:2]))
        fit = find_break(trajectory(run.places.positions, np.stack(sums, axis=1), statistic), level)
        best, row = fit.best, ChangeRow(scheme, "none", "", points)
        if fit.against_line <= 1 - level:
            row = replace(row, verdict="bend")
        if row.verdict == "bend" and fit.against_curve <= 1 - level:
            row = replace(
                row,
                verdict="change",
                kind=best.kind if best.certain else "either",
                at=best.at,
                effect=best.effect if best.certain else None,
                decay=_where(best.at, decay),
                loss_end=_where(best.at, loss_end),
            )
        rows.append(replace(row, against_line=fit.against_line, against_curve=fit.against_curve))
    return tuple(rows)


def _where(at: Interval, span: Span | None) -> Where | None:
    if span is None:
        return None
    return "before" if at.high < span.low else "after" if at.low > span.high else "around"


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
        if full.high < 0:
            moved = f"gained {spread(Interval(-full.estimate, -full.high, -full.low))}"
        elif full.low > 0:
            moved = f"rose by {spread(full)} itself"
        else:
            moved = f"has no detectable change ({spread(full)})"
        message = (
            f"at {scheme} `{before}` is better than `{end}`: from there on the quantized loss rose "
            f"by {spread(rise)} nats per token, while full precision {moved}"
        )
        hint = f"ship `{before}`, or a soup, where this scheme is what ships"
        yield Finding("QA030", "warn", end, scheme, message, hint, rise, margin=0.0)


def _along(run: PhaseRun, course: Course) -> Iterator[Finding]:
    """QA031: the loss barely improves any more, and the added loss grows. QA032: it breaks."""
    if course.loss_end is not None:
        label = course.loss_end.high_label
        start, last = run.labels.index(label), len(run.labels) - 1
        level = run.level(len(run.labels) * max(1, len(run.schemes)))
        for scheme in run.schemes:
            ends = [(k, which) for k in (last, start) for which in (scheme, FULL_PRECISION)]
            growth = run.interval(ends, statistics.excess_difference, level)
            if growth.low <= 0:
                continue
            message = (
                f"from `{label}` on full-precision loss improves by less than {100 * BARELY:g} %, "
                f"while the added loss at {scheme} grew by {percent(growth)} percentage points"
            )
            hint = (
                "train no further for this scheme; a decay of the learning rate that is still to "
                "come may lower the loss again, and was not measured"
            )
            yield Finding("QA031", "warn", label, scheme, message, hint, growth, margin=0.0)
    for change in course.changes:
        if change.scheme != FULL_PRECISION and change.verdict == "change":
            cell, place = (run.labels[-1], change.scheme), _place(course, change)
            message = f"the added loss at {change.scheme} changes its course: {place}"
            hint = "a fast smooth rise fits such a course as well: see `docs/diagnostics.md`"
            yield Finding("QA032", "info", *cell, message, hint, change.at, outcome="pass")


_KINDS = {"turn": "a turn", "jump": "a jump", "either": "a turn or a jump"}
_WHERE = {"before": "before", "around": "indistinguishable from", "after": "after"}


def _place(course: Course, change: ChangeRow) -> str:
    """Return what kind of change it is, where, and whether it is beside other events."""
    at = change.at
    assert at is not None
    low, middle, high = (
        count(round(value)) if math.isfinite(value) else NOT_FINITE
        for value in (at.low, at.estimate, at.high)
    )
    place = f"{middle} [{low}, {high}]"
    in_order = course.unit == "checkpoints in order"
    place = f"checkpoint {place}" if in_order else f"{place} {course.unit}"
    text = f"{_KINDS[change.kind or 'either']} at {place}"
    if change.decay is not None:
        text += f", {_WHERE[change.decay]} the start of the learning rate's decay"
    if change.loss_end is not None:
        text += f", {_WHERE[change.loss_end]} the end of the loss's improvement"
    return text


TITLE = "Phases"


def section(view: View) -> doc.Section:
    courses = view.audit.diagnostics.phases
    longest = max(courses, key=lambda course: len(course.checkpoints), default=None)
    if longest is None:
        return doc.Section(TITLE, (), 5)
    blocks: list[doc.Block] = [doc.bullets(*_sentences(longest))]
    if further := len(courses) - 1:
        blocks.append(doc.paragraph(f"{plural(further, 'more run')} in `audit.json`."))
    return doc.Section(TITLE, tuple(blocks), 5)


def _sentences(course: Course) -> Iterator[str]:
    """Yield what a run shows: the rate, the loss, the errors."""
    first, last = course.checkpoints[0], course.checkpoints[-1]
    yield f"From `{first}` to `{last}`, {plural(len(course.checkpoints), 'checkpoint')}."
    yield _span("The learning rate starts to fall", course.decay, course.decay_reason)
    yield _span(
        "Full-precision loss stops improving", course.loss_end, course.loss_end_reason, "When "
    )
    rows = [row for row in course.changes if row.scheme != FULL_PRECISION]
    bent = [row.scheme for row in rows if row.verdict == "bend"]
    none = [row.scheme for row in rows if row.verdict == "none"]
    for row in rows:
        if row.verdict == "change":
            place = _place(course, row)
            yield f"The added loss under {row.scheme} has a change point, {place}."
    if bent:
        yield (
            f"Under {listing(bent)} the added loss follows no straight line, and a smooth "
            "curve may describe it as well as a change point."
        )
    if none:
        yield f"No change point is detectable under {listing(none)}."
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict == "unknown":
            reasons.setdefault(row.reason, []).append(row.scheme)
    for reason, schemes in reasons.items():
        under = "" if len(schemes) == len(rows) else f" under {listing(schemes)}"
        yield f"Change points were not searched{under}: {reason}."


def _span(what: str, span: Span | None, reason: str, before: str = "Where ") -> str:
    if span is None:
        lower = what[0].lower() + what[1:]
        return f"{before}{lower} is unknown: {reason}."
    if span.low == span.high:
        return f"{what} at `{span.low_label}`."
    return f"{what} between `{span.low_label}` and `{span.high_label}`."
