"""Which unmeasured checkpoints could change the pick, by what the measured ones show.

Two things are predicted along the run that most of the audit is of: the relative error, and the
quantized loss, which decides what ships. The most promising checkpoint is the one from which the
largest gain over the best measured loss is expected: near the best, or little known. A
prediction is no measurement, and none is ever put into an audit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from qaudit.core import statistics
from qaudit.core.course import Places, courses
from qaudit.core.predictor import MINIMUM_POINTS, Known, Predicted, predict
from qaudit.core.statistics import Array
from qaudit.judge.quantities import interval_of
from qaudit.judge.table import Measurements
from qaudit.types import FULL_PRECISION, Checkpoint, Interval, Prospect, Suggestion, Worth


def suggest(table: Measurements, series: Sequence[Checkpoint], scheme: str) -> Suggestion:
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
