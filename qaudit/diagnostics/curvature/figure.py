"""Trace and largest eigenvalue of the Hessian along the series, with their scatter."""

from __future__ import annotations

import math

from qaudit.diagnostics.curvature.section import whole_models
from qaudit.report.chart import FAINT, POINT, Chart, look_of
from qaudit.report.format import count, digits, interval_text
from qaudit.report.series import axis, soup_position, trunk
from qaudit.report.views import View
from qaudit.types import CurvatureRow, Interval

NAME = "curvature"
ALT = "Trace and largest eigenvalue of the Hessian along the series"


def is_drawn(view: View) -> bool:
    models = whole_models(view)
    return sum(subject.label in models for subject in view.checkpoints) > 1


def draw(view: View) -> Chart:
    models, where = whole_models(view), axis(view)
    soups = [s.label for s in view.soups if s.label in models]
    places = where.positions | {s: soup_position(where, k) for k, s in enumerate(soups)}
    values = {
        name: {label: read(models[label]) for label in places if label in models}
        for name, read in (("trace", _trace), ("largest eigenvalue", _largest))
    }
    panels = {name: at for name, at in values.items() if any(at.values())}
    note = "Bands and bars: intervals over probes and documents, of an eigenvalue its residual"
    note += "; hollow: other ingredients" + ("; star: soup." if soups else ".")
    chart = Chart("How sharp the loss is, along the series", note, 40 + 216 * len(panels))
    main = [s.label for s in trunk(view)]
    for k, (name, at) in enumerate(panels.items()):
        axes = chart.axes(78, 800, 34 + 216 * k, 204 + 216 * k, name)
        look, series = look_of(k), str(k)
        style = {"color": look["color"]}
        known = {label: (places[label], i) for label, i in at.items() if i is not None}
        for end in sorted(where.stage_ends.values())[:-1]:
            axes.axvline(end, color=FAINT, ls="--", lw=POINT, zorder=1)
        chart.curve(axes, series, [known[label] for label in main if label in known], **look)
        chart.whiskers(axes, series, [p for lab, p in known.items() if lab not in main], **style)
        for labels, marker, filled in (
            (main, "o", True),
            ([s.label for s in view.checkpoints if s.label not in main], "o", False),
            (soups, "*", True),
        ):
            marks = [
                (*_place(known[label]), f"{label}\n{name} {_text(name, known[label][1])}")
                for label in labels
                if label in known
            ]
            chart.marks(axes, series, marks, filled=filled, marker=marker, **style)
        estimates = [interval.estimate for _, interval in known.values()]
        if min(estimates) > 0 and max(estimates) > 20 * min(estimates):
            axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.xaxis.set_major_formatter(lambda x, _: count(round(x)))
    axes.set_xlabel(where.name)
    axes.spines["bottom"].set_visible(True)
    return chart


def _place(known: tuple[float, Interval]) -> tuple[float, float]:
    return known[0], known[1].estimate


def _text(name: str, value: Interval) -> str:
    return interval_text(value) if name == "trace" else digits(value.estimate)


def _trace(row: CurvatureRow) -> Interval | None:
    trace = row.trace_elsewhere or row.trace
    return trace if math.isfinite(trace.estimate) else None


def _largest(row: CurvatureRow) -> Interval | None:
    if not row.eigenvalues or not math.isfinite(row.eigenvalues[0]):
        return None
    value, residual = row.eigenvalues[0], row.residuals[0]
    return Interval(value, value - residual, value + residual)
