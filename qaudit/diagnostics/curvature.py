"""How sharp the loss is: trace and eigenvalues of its Hessian, by role and along the series."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.scheme import Limit, Scheme, limited
from qaudit.diagnostics.diagnostic import (
    OUTSIDE,
    Diagnostic,
    DiagnosticFigure,
    DiagnosticWork,
    at_least,
)
from qaudit.report import document as doc
from qaudit.report.chart import Chart, look_of
from qaudit.report.format import NOT_MEASURED, digits, interval_text, plural
from qaudit.report.plots import FAR, along, series_axis
from qaudit.report.series import picture
from qaudit.report.views import View
from qaudit.types import CurvatureRow, Interval

FORWARDS = 14
"""Forward passes that a product with the Hessian takes: blocks run again in both derivatives."""


PART: Limit = (lambda part: 0 <= part < 1, OUTSIDE, "use a number from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Curvature(Diagnostic):
    """Trace and largest eigenvalues of the Hessian of the loss, by role and layer too."""

    name: ClassVar[str] = "curvature"

    documents: int = at_least(2, 16)
    probes: int = at_least(2, 30)  # at most
    tolerance: float = limited(0.01, PART)  # standard error of the trace, as a part of it
    eigenvalues: int = at_least(0, 1)  # 0: only the trace
    steps: int = at_least(2, 40)  # of Lanczos, at most
    residual: float = limited(0.01, PART)  # of an eigenvalue, as a part of it
    seed: int = at_least(0, 0)

    def work(self, schemes: Sequence[Scheme], blocks: int) -> DiagnosticWork:
        products = self.probes + (self.steps if self.eigenvalues else 0)
        return DiagnosticWork(
            f"curvature: at most {products} products with the Hessian on {self.documents} "
            f"documents, each of about {FORWARDS} forward passes; the model held whole in float32, "
            "and three vectors like it",
            passes=FORWARDS * products,
            documents=self.documents,
        )


MODELS = ("subject", "trace", "trace, on these documents", "largest eigenvalue", "smallest")
ROLES = ("role", "trace, over probes", "share, %", "per million parameters")


def section(view: View) -> doc.Section:
    models = whole_models(view)
    if not models:
        return doc.Section("How sharp the loss is", (), 5)
    first = next(iter(models.values()))
    legend = (
        f"The Hessian of the mean loss of a token, for all parameters, on "
        f"{plural(first.documents, view.unit)} and {plural(first.tokens, 'token')}. Intervals "
        f"at {100 * view.audit.plan.recipe.confidence:g} % are over probes and {view.unit}s."
    )
    rows = (
        (
            doc.name_cell(label),
            interval_text(model.trace_elsewhere),
            interval_text(model.trace),
            digits(model.eigenvalues[0]) if model.eigenvalues else NOT_MEASURED,
            digits(model.smallest),
        )
        for label, model in models.items()
    )
    notes = dict.fromkeys(note for model in models.values() for note in model.notes)
    bullets = [doc.bullets(*notes)] if notes else []
    blocks = [
        doc.paragraph(legend),
        doc.paragraph(along_the_series(view, models)),
        *picture(view, "curvature"),
        doc.fold("Every subject", doc.table(MODELS, rows), *bullets),
    ]
    by_role = [row for row in view.audit.diagnostics.curvature if row.part == "role"]
    with_roles = [label for label in models if label in {row.subject for row in by_role}]
    if with_roles:
        last = view.last.label if view.last and view.last.label in with_roles else with_roles[-1]
        whole = models[last].trace.estimate
        roles = (
            (
                doc.name_cell(role.name),
                interval_text(role.trace),
                f"{100 * role.trace.estimate / whole:.0f}" if whole > 0 else NOT_MEASURED,
                digits(1e6 * role.trace.estimate / role.parameters),
            )
            for role in sorted(by_role, key=lambda row: -row.trace.estimate)
            if role.subject == last
        )
        blocks.append(doc.fold(f"By role, {last}", doc.table(ROLES, roles)))
    return doc.Section("How sharp the loss is", tuple(blocks), 5)


def whole_models(view: View) -> dict[str, CurvatureRow]:
    rows = {row.subject: row for row in view.audit.diagnostics.curvature if row.part == "model"}
    return {s.label: rows[s.label] for s in view.subjects if s.label in rows}


def along_the_series(view: View, models: dict[str, CurvatureRow]) -> str:
    if view.last is None or view.last.label not in models:
        return ""
    last = models[view.last.label]
    trace = interval_text(_trace(last))
    text = f"At the last checkpoint `{last.subject}` the trace of the Hessian is {trace}"
    if last.eigenvalues:
        text += f" and its largest eigenvalue {digits(last.eigenvalues[0])}"
    end = view.stage_end
    if end is None or end.label not in models:
        return f"{text}."
    before = models[end.label]
    a, b = _trace(before), _trace(last)
    they_are = "they are" if last.eigenvalues else "it is"
    text += f"; at the end of {end.first.stage} (`{before.subject}`) {they_are} {interval_text(a)}"
    if before.eigenvalues:
        text += f" and {digits(before.eigenvalues[0])}"
    if a.estimate <= 0 or (b.low <= a.high and a.low <= b.high):
        return f"{text}. The difference of the two traces is within their scatter."
    verb = "rose" if b.estimate > a.estimate else "fell"
    return f"{text}. The trace {verb} to {b.estimate / a.estimate:.2g} times what it was."


def _trace(row: CurvatureRow) -> Interval:
    return row.trace_elsewhere or row.trace


ALT = "Trace and largest eigenvalue of the Hessian along the series"


def _is_drawn(view: View) -> bool:
    models = whole_models(view)
    return sum(subject.label in models for subject in view.checkpoints) > 1


def _draw(view: View) -> Chart:
    models, places = whole_models(view), view.axis.places
    values = {
        "trace": {label: _trace(row) for label, row in models.items()},
        "largest eigenvalue": {
            label: Interval(value, value - row.residuals[0], value + row.residuals[0])
            for label, row in models.items()
            for value in row.eigenvalues[:1]
        },
    }
    finite = {
        name: {label: i for label, i in at.items() if math.isfinite(i.estimate)}
        for name, at in values.items()
    }
    panels = {name: at for name, at in finite.items() if at}
    note = "Bands and bars: intervals over probes and documents, of an eigenvalue its residual"
    note += "; hollow: other ingredients" + ("; star: soup." if view.soups else ".")
    title = "How sharp the loss is, along the series"
    chart = Chart(title, note, 0.3 + 1.9 * len(panels))
    every = chart.panels(*(1.0 for _ in panels), sharex=True)
    for k, (axes, (name, at)) in enumerate(zip(every, panels.items(), strict=True)):
        axes.set_ylabel(name)
        shown = interval_text if name == "trace" else lambda interval: digits(interval.estimate)
        points = {
            label: (places[label], i, f"{label}\n{name} {shown(i)}") for label, i in at.items()
        }
        along(view, chart, axes, str(k), points, **look_of(k))
        estimates = [interval.estimate for interval in at.values()]
        if min(estimates) > 0 and max(estimates) > FAR * min(estimates):
            axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    series_axis(view, every)
    return chart


FIGURE = DiagnosticFigure("curvature", ALT, _is_drawn, _draw)
