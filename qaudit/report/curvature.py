"""Curvature and slices through the loss, as the card and pictures show them.

A slice is set against the parabola through its middle and the points beside it: where the loss
of the quantized model lies above that, quantization goes further than the curvature at the
checkpoint tells of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qaudit.report.views import View
from qaudit.types import CurvatureRow, Interval, PlaneRow

# --------------------------------------------------------------------------- curvature


def whole_models(view: View) -> dict[str, CurvatureRow]:
    """Return what is said of each subject as a whole, in the order of the series."""
    found = {row.subject: row for row in view.audit.diagnostics.curvature if row.part == "model"}
    return {s.label: found[s.label] for s in view.subjects if s.label in found}


def roles_of(view: View, label: str) -> list[CurvatureRow]:
    """Return what is said of each role of a subject, the sharpest first."""
    own = [
        row
        for row in view.audit.diagnostics.curvature
        if row.subject == label and row.part == "role"
    ]
    return sorted(own, key=lambda row: -row.trace.estimate)


def along_the_series(view: View) -> str:
    """Say how trace and largest eigenvalue at the end compare with those when decay began."""
    models = whole_models(view)
    if view.last is None or view.last.label not in models:
        return ""
    last = models[view.last.label]
    text = f"At the last checkpoint `{last.subject}` the trace of the Hessian is {_trace(last)}"
    if last.eigenvalues:
        text += f" and its largest eigenvalue {digits(last.eigenvalues[0])}"
    end = view.stage_end
    if end is None or end.label not in models:
        return f"{text}."
    before = models[end.label]
    text += f"; at the end of {end.first.stage} (`{before.subject}`) they are {_trace(before)}"
    text = text if last.eigenvalues else text.replace("they are", "it is")
    if before.eigenvalues:
        text += f" and {digits(before.eigenvalues[0])}"
    return f"{text}. {_compared(before, last)}"


def _compared(before: CurvatureRow, last: CurvatureRow) -> str:
    """Say whether the trace moved by more than documents and probes scatter it."""
    a, b = (row.trace_elsewhere or row.trace for row in (before, last))
    if a.estimate <= 0 or (b.low <= a.high and a.low <= b.high):
        return "Between the two the trace is not to be told apart from its scatter."
    verb = "rose" if b.estimate > a.estimate else "fell"
    return f"The trace {verb} to {b.estimate / a.estimate:.2g} times what it was."


def _trace(row: CurvatureRow) -> str:
    return interval_text(row.trace_elsewhere or row.trace)


def interval_text(found: Interval | None) -> str:
    """Print an interval of any size with the digits that its width deserves."""
    if found is None:
        return "-"
    half = (found.high - found.low) / 2
    if not math.isfinite(half) or half <= 0:
        return digits(found.estimate)
    places = 1 - math.floor(math.log10(half))
    low, middle, high = (
        f"{round(value, places):,.{max(0, places)}f}"
        for value in (found.low, found.estimate, found.high)
    )
    return f"{middle} [{low}, {high}]"


def digits(value: float | None) -> str:
    """Print a number with three digits, whatever its size."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    places = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"


# ------------------------------------------------------------------------------- slices


@dataclass(frozen=True)
class Line:
    """The loss of a subject along the direction of quantization, from the subject on."""

    subject: str
    scheme: str
    points: tuple[tuple[float, Interval], ...]  # (b, change of the loss)

    @property
    def quantized(self) -> Interval | None:
        """The change at the quantized model."""
        return next((change for b, change in self.points if b == 1.0), None)

    @property
    def parabola(self) -> float | None:
        """What a parabola through the middle and its neighbours makes of the quantized model."""
        known = {b: change.estimate for b, change in self.points}
        step = min((b for b in known if b > 0), default=None)
        if step is None or step >= 1 or -step not in known:
            return None
        slope = (known[step] - known[-step]) / (2 * step)
        bend = (known[step] + known[-step]) / step**2
        return slope + bend / 2


def lines(view: View) -> dict[str, Line]:
    """Return the line of each subject that has one, in the order of the series."""
    found: dict[str, list[PlaneRow]] = {}
    for row in view.audit.diagnostics.plane:
        if row.a == 0.0:
            found.setdefault(row.subject, []).append(row)
    made = {
        label: Line(
            label, rows[0].scheme, tuple(sorted((row.b, row.absolute_change) for row in rows))
        )
        for label, rows in found.items()
    }
    return {s.label: made[s.label] for s in view.subjects if s.label in made}


def shown_lines(view: View) -> list[Line]:
    """Return the lines of the end of a stage, the last checkpoint and what is to be shipped."""
    pick = view.audit.pick.subject if view.audit.pick else None
    labels = [view.stage_end and view.stage_end.label, view.last and view.last.label, pick]
    known = lines(view)
    chosen = [known[label] for label in dict.fromkeys(labels) if label in known]
    return chosen or list(known.values())[:3]


def grid(view: View) -> list[PlaneRow]:
    """Return the points of one grid: that of the last subject that has one."""
    rows = [row for row in view.audit.diagnostics.plane if row.previous is not None]
    order = {subject.label: k for k, subject in enumerate(view.subjects)}
    last = max((row.subject for row in rows), key=lambda label: order.get(label, -1), default="")
    return [row for row in rows if row.subject == last]


def beyond_the_parabola(line: Line) -> str:
    """Say what the way to the quantized model costs, and what curvature alone tells of that."""
    quantized, expected = line.quantized, line.parabola
    if quantized is None:
        return ""
    text = f"From `{line.subject}` to its {line.scheme} self the loss rises by "
    text += f"{interval_text(quantized)} nats per token"
    if expected is None:
        return f"{text}."
    if quantized.low <= expected <= quantized.high:
        told = "as much as"
    else:
        told = "more than" if expected < quantized.low else "less than"
    return f"{text}, {told} the curvature where it starts tells of ({digits(expected)})."
