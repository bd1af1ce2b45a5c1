"""How sharp the loss is: trace and eigenvalues of its Hessian, by role and along the series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.scheme import Limit, Scheme, limited
from qaudit.diagnostics.diagnostic import (
    OUTSIDE,
    Diagnostic,
    DiagnosticWork,
    at_least,
)
from qaudit.report import document as doc
from qaudit.report.format import NOT_MEASURED, digits, interval_text, plural
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
    by_subject = {
        row.subject: row for row in view.audit.diagnostics.curvature if row.part == "model"
    }
    models = {s.label: by_subject[s.label] for s in view.subjects if s.label in by_subject}
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
    blocks: list[doc.Block] = [
        doc.paragraph(legend),
        doc.paragraph(along_the_series(view, models)),
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
