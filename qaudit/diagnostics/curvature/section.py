"""The section `How sharp the loss is`: trace and eigenvalues by subject, and by role."""

from __future__ import annotations

from qaudit.report import document as doc
from qaudit.report.format import NOT_MEASURED, digits, interval_text, plural
from qaudit.report.series import picture
from qaudit.report.views import View
from qaudit.types import CurvatureRow


def section(view: View) -> doc.Section:
    models = whole_models(view)
    blocks: list[doc.Block] = []
    if models:
        blocks += [doc.paragraph(_legend(view, models)), doc.paragraph(along_the_series(view))]
        blocks += picture(view, "curvature")
        blocks += [doc.fold("Every subject", *_table(models)), *_roles(view, models)]
    return doc.Section("How sharp the loss is", tuple(blocks), 5)


def _legend(view: View, models: dict[str, CurvatureRow]) -> str:
    first = next(iter(models.values()))
    level = f"{100 * view.audit.plan.recipe.confidence:g}"
    return (
        f"The Hessian of the mean loss of a token, for all parameters, on "
        f"{plural(first.documents, view.unit)} and {plural(first.tokens, 'token')}. Intervals at "
        f"{level} % are over probes and {view.unit}s."
    )


def _table(models: dict[str, CurvatureRow]) -> tuple[doc.Block, ...]:
    names = doc.columns(
        "subject", "trace", "trace, on these documents", "largest eigenvalue", "smallest"
    )
    rows = tuple(
        doc.row(
            doc.name_cell(label),
            interval_text(model.trace_elsewhere),
            interval_text(model.trace),
            digits(model.eigenvalues[0]) if model.eigenvalues else NOT_MEASURED,
            digits(model.smallest),
        )
        for label, model in models.items()
    )
    notes = dict.fromkeys(note for model in models.values() for note in model.notes)
    return (doc.TableBlock(names, rows), *([doc.bullets(*notes)] if notes else []))


def _roles(view: View, models: dict[str, CurvatureRow]) -> tuple[doc.Block, ...]:
    with_roles = [label for label in models if roles_of(view, label)]
    if not with_roles:
        return ()
    last = view.last.label if view.last and view.last.label in with_roles else with_roles[-1]
    whole = models[last].trace.estimate
    rows = tuple(
        doc.row(
            doc.name_cell(role.name),
            interval_text(role.trace),
            f"{100 * role.trace.estimate / whole:.0f}" if whole > 0 else NOT_MEASURED,
            digits(1e6 * role.trace.estimate / role.parameters),
        )
        for role in roles_of(view, last)
    )
    names = doc.columns("role", "trace, over probes", "share, %", "per million parameters")
    return (doc.fold(f"By role, {last}", doc.TableBlock(names, rows)),)


def whole_models(view: View) -> dict[str, CurvatureRow]:
    rows = {row.subject: row for row in view.audit.diagnostics.curvature if row.part == "model"}
    return {s.label: rows[s.label] for s in view.subjects if s.label in rows}


def roles_of(view: View, label: str) -> list[CurvatureRow]:
    rows = view.audit.diagnostics.curvature
    roles = (row for row in rows if row.subject == label and row.part == "role")
    return sorted(roles, key=lambda row: -row.trace.estimate)


def along_the_series(view: View) -> str:
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
    a, b = (row.trace_elsewhere or row.trace for row in (before, last))
    if a.estimate <= 0 or (b.low <= a.high and a.low <= b.high):
        return "The difference of the two traces is within their scatter."
    verb = "rose" if b.estimate > a.estimate else "fell"
    return f"The trace {verb} to {b.estimate / a.estimate:.2g} times what it was."


def _trace(row: CurvatureRow) -> str:
    return interval_text(row.trace_elsewhere or row.trace)
