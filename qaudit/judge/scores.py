"""Each measurement, each comparison of two subjects, and each stratum, with its intervals.

Strata are groups of documents that a field of the text names. All intervals of one subject under
one scheme hold at once (Bonferroni over its strata), so that the largest of them can be read as it
is. The worst stratum is named by its estimate; its interval is that of the largest true value: no
stratum is worse than the highest upper bound, and at least one is as bad as the highest lower
bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Literal

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.course import Places, courses
from qaudit.core.predictor import MINIMUM_POINTS, Known, Predicted, predict
from qaudit.core.statistics import Array, Statistic, documents_for_width
from qaudit.errors import AuditError
from qaudit.judge.choose import NO_SEARCH
from qaudit.judge.table import (
    Cell,
    EvidenceFiles,
    Measurements,
    fidelity_columns,
    interval_of,
    is_finite,
    largest_share,
    mean_columns,
    reference_columns,
)
from qaudit.types import (
    FULL_PRECISION,
    Checkpoint,
    Comparison,
    Interval,
    Measurement,
    MeasurementRow,
    Prospect,
    Suggestion,
    Worth,
)

NARROW = 0.1
"""Of an estimate: how far its interval reaches with the documents that a row names."""

_Kind = Literal["outright", "difference_of_differences", "relative_error_difference"]
_KINDS: dict[_Kind, tuple[str, Statistic]] = {
    "outright": ("nats per token", statistics.change),
    "difference_of_differences": ("nats per token", statistics.change_difference),
    "relative_error_difference": ("fraction", statistics.excess_difference),
}

_SHARED = {field.name for field in fields(MeasurementRow)} - {"evidence"}
"""Columns that a measurement has itself are copied."""


def score(
    table: Measurements, measured: Measurement, files: EvidenceFiles, reference: str | None = None
) -> MeasurementRow:
    evidence, confidence = measured.evidence, table.confidence
    nll, tokens = evidence.nll_sum, evidence.tokens
    used = tokens > 0
    full = None if measured.scheme == FULL_PRECISION else table.full(measured.subject)
    relative = change = share = needed = None
    if full is not None and is_finite(full) and is_finite(measured) and used.any():
        pair = nll[used], full.evidence.nll_sum[used]
        relative = statistics.relative_error(*pair, confidence)
        change = statistics.absolute_change(*pair, tokens[used], confidence)
        share = largest_share(pair[0] - pair[1])
        needed = documents_for_width(pair, statistics.excess, NARROW, confidence)
    ce = statistics.cross_entropy(nll[used], tokens[used], confidence)
    per_byte = is_finite(measured) and evidence.nbytes.any()
    of_kl = mean_columns(evidence, "kl")
    per_parameter = None
    if measured.nbytes is not None and measured.parameters:
        per_parameter = 8 * measured.nbytes / measured.parameters
    place = (measured.subject, measured.spec, measured.calibration_seed)
    if place not in files:
        raise AuditError(
            f"there is no evidence for `{measured.subject}` under `{measured.scheme}`",
            hint="run the same scan again: what is missing is measured again",
        )
    path, sha256 = files[place]
    return MeasurementRow(
        **{name: value for name, value in vars(measured).items() if name in _SHARED},
        ce=ce,
        relative_error=relative,
        absolute_change=change,
        perplexity=statistics.perplexity(ce.estimate),
        bits_per_byte=statistics.bits_per_byte(nll, evidence.nbytes) if per_byte else None,
        documents=table.documents,
        tokens=int(tokens.sum()),
        evidence=path,
        evidence_sha256=sha256,
        bits_per_parameter=per_parameter,
        worst_share=share,
        documents_for_loss=needed,
        documents_for_kl=of_kl
        and documents_for_width(of_kl, statistics.per_token, NARROW, confidence),
        **fidelity_columns(evidence, confidence),
        **(reference_columns(measured, reference, confidence) if reference else {}),
    )


def first_rows(rows: Sequence[MeasurementRow]) -> dict[Cell, MeasurementRow]:
    """Return one row for each subject and scheme: of several draws the one that is judged."""
    first: dict[Cell, MeasurementRow] = {}
    for row in sorted(rows, key=lambda row: row.calibration_seed):
        first.setdefault(row.cell, row)
    return {row.cell: first[row.cell] for row in rows}


def compare(table: Measurements, searched: Mapping[str, int] = NO_SEARCH) -> tuple[Comparison, ...]:
    """Compare pairs of subjects under every scheme that both were measured with.

    Differences are paired on the same documents; a negative one favours `a`. Three questions can
    have different answers: which quantized model is better as it is (`outright`, which decides
    what to ship), which loses less to quantization in nats (`difference_of_differences`), and which
    loses a smaller part of its own loss (`relative_error_difference`, the reading of the papers).

    The best of ten soups looks better than its members by luck alone: the intervals of soups hold
    for all soups at once, those that a search tried (`searched`) among them.
    """
    soups = [subject.label for subject in table.subjects if subject.kind == "soup"]
    among = sum(max(1, searched.get(label, 1)) for label in soups)

    rows = []
    for a, b in _pairs(table):
        level = statistics.simultaneous(table.confidence, among if {a, b} & {*soups} else 1)
        for scheme in (FULL_PRECISION, *table.quantized_schemes):
            for kind, (unit, statistic) in _KINDS.items():
                schemes = (scheme,) if kind == "outright" else (scheme, FULL_PRECISION)
                if schemes == (FULL_PRECISION, FULL_PRECISION):
                    continue
                cells = [(label, which) for label in (a, b) for which in schemes]
                interval = interval_of(table, cells, statistic, confidence=level)
                if interval is not None:
                    verdict = judge_difference(interval, table.documents)
                    rows.append(
                        Comparison(kind, unit, scheme, a, b, interval, verdict, table.documents)
                    )
    return tuple(rows)


def _pairs(table: Measurements) -> Iterator[tuple[str, str]]:
    """Yield soups with members and the last checkpoint, and what ends a series with stages."""
    last = table.last_checkpoint
    for subject in table.subjects:
        if subject.kind == "soup":
            rivals = dict.fromkeys([*table.members(subject), *([last] if last else [])])
            yield from ((subject.label, other) for other in rivals)
    for reached in table.series_ends():
        yield from ((reached, end) for end in table.stage_ends() if reached != end)


def judge_difference(
    interval: Interval, documents: int
) -> Literal["a_better", "b_better", "equivalent", "inconclusive"]:
    """Compare an interval with zero; losses that are equal to the bit are equivalent."""
    if documents < statistics.MINIMUM_DOCUMENTS:
        return "inconclusive"
    if interval.low == interval.high == 0:
        return "equivalent"
    if interval.high < 0:
        return "a_better"
    return "b_better" if interval.low > 0 else "inconclusive"


def strata_of(measured: Measurement) -> dict[str, npt.NDArray[np.bool_]]:
    """Return which of the scored documents each stratum has; nothing if they are not grouped."""
    if not measured.evidence.strata:
        return {}
    names = np.array(measured.evidence.strata)[measured.evidence.scored()]
    return {str(name): names == name for name in dict.fromkeys(names.tolist())}


def largest(intervals: Iterable[Interval]) -> Interval:
    """Return the interval of the largest of several values whose intervals hold at once."""
    bounds = [(interval.estimate, interval.low, interval.high) for interval in intervals]
    return Interval(*map(max, zip(*bounds, strict=True)))


def suggest(table: Measurements, series: Sequence[Checkpoint], scheme: str) -> Suggestion:
    """Return which unmeasured checkpoints could change the pick, by what the measured ones show.

    Two things are predicted along the run that most of the audit is of: the relative error, and
    the quantized loss, which decides what ships. The most promising checkpoint is the one from
    which the largest gain over the best measured loss is expected: near the best, or little known.
    A prediction is no measurement, and none is ever put into an audit.
    """
    errors, losses = dict[str, float](), dict[str, float]()
    for label in (c.label for c in series):
        cells = [(label, scheme), (label, FULL_PRECISION)]
        error = interval_of(table, cells, statistics.excess)
        loss = interval_of(table, cells[:1], statistics.per_token)
        if error is not None and loss is not None:
            errors[label], losses[label] = error.estimate, loss.estimate
    run, places = max(courses(series), key=lambda course: sum(c.label in errors for c in course[0]))
    measured = [k for k, c in enumerate(run) if c.label in errors]
    new = [k for k, c in enumerate(run) if table.find(c.label, FULL_PRECISION) is None]
    if len(measured) < MINIMUM_POINTS:
        reason = f"{len(measured)} checkpoints are measured; it takes {MINIMUM_POINTS} to predict"
        return Suggestion(scheme, reason, measured=len(measured))
    if not new:
        return Suggestion(scheme, "every checkpoint of the run is measured", measured=len(measured))
    names, values_NF = _signals(run, places, [*measured, *new])
    positions_N = np.array(places.positions)
    labels = [run[k].label for k in measured]

    def predicted(values: Mapping[str, float]) -> Predicted:
        columns = np.array([values[label] for label in labels])
        of = Known(positions_N[measured], values_NF[: len(measured)], columns)
        return predict(of, positions_N[new], values_NF[len(measured) :])

    def interval(prediction: Predicted, m: int) -> Interval:
        value = float(prediction.values_M[m])
        half = prediction.reach(table.confidence) * float(prediction.errors_M[m])
        return Interval(value, value - half, value + half)

    of_error, of_loss = predicted(errors), predicted(losses)
    best = min(labels, key=lambda label: losses[label])
    ends = float(positions_N[measured].min()), float(positions_N[measured].max())
    rows = [
        Prospect(
            label=run[k].label,
            position=float(positions_N[k]),
            error=interval(of_error, m),
            loss=interval(of_loss, m),
            better=float(of_loss.below(losses[best])[m]),
            gain=float(of_loss.gains(losses[best])[m]),
            beyond=not ends[0] <= positions_N[k] <= ends[1],
        )
        for m, k in enumerate(new)
    ]
    rows.sort(key=lambda row: (-row.gain, row.position))
    return Suggestion(
        scheme=scheme,
        unit=places.unit,
        measured=len(measured),
        signals=names,
        best=best,
        best_loss=losses[best],
        error=Worth(of_error.method, **of_error.left_out),
        loss=Worth(of_loss.method, **of_loss.left_out),
        prospects=tuple(rows),
    )


def _signals(
    run: Sequence[Checkpoint], places: Places, which: Sequence[int]
) -> tuple[tuple[str, ...], Array]:
    """Return the names and values of what every checkpoint concerned has, as far as it varies."""
    x = np.array(places.positions)
    log = np.log(x - min(0.0, float(x.min())) + 1.0)
    columns = {places.unit: x[which], f"log {places.unit}": log[which]}
    rates = [rate for k in which if (rate := run[k].learning_rate) is not None]
    if len(rates) == len(which):
        columns["learning rate"] = np.array(rates)
    telling = {name: column for name, column in columns.items() if np.ptp(column) > 0}
    return tuple(telling), np.stack(list(telling.values()), axis=1)
