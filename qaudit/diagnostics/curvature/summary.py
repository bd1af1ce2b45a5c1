"""Curvature of the subjects of an audit, and its course along the series."""

from __future__ import annotations

from qaudit.diagnostics.format import digits, interval_text
from qaudit.report.views import View
from qaudit.types import CurvatureRow


def whole_models(view: View) -> dict[str, CurvatureRow]:
    """Return the row of each whole subject, in the order of the series."""
    rows = {row.subject: row for row in view.audit.diagnostics.curvature if row.part == "model"}
    return {s.label: rows[s.label] for s in view.subjects if s.label in rows}


def roles_of(view: View, label: str) -> list[CurvatureRow]:
    """Return the rows of the roles of a subject, the largest trace first."""
    rows = view.audit.diagnostics.curvature
    roles = (row for row in rows if row.subject == label and row.part == "role")
    return sorted(roles, key=lambda row: -row.trace.estimate)


def along_the_series(view: View) -> str:
    """Compare trace and largest eigenvalue at the end with those at the end of the stage before."""
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
    """Compare two traces, with the scatter of documents and probes."""
    a, b = (row.trace_elsewhere or row.trace for row in (before, last))
    if a.estimate <= 0 or (b.low <= a.high and a.low <= b.high):
        return "The difference of the two traces is within their scatter."
    verb = "rose" if b.estimate > a.estimate else "fell"
    return f"The trace {verb} to {b.estimate / a.estimate:.2g} times what it was."


def _trace(row: CurvatureRow) -> str:
    return interval_text(row.trace_elsewhere or row.trace)
