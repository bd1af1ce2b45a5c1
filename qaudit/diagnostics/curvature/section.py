"""The section `How sharp the loss is`: trace and eigenvalues by subject, and by role."""

from __future__ import annotations

from qaudit.diagnostics.curvature.summary import along_the_series, roles_of, whole_models
from qaudit.diagnostics.format import digits, interval_text
from qaudit.report.card.series import picture
from qaudit.report.document import (
    Block,
    Section,
    Table,
    bullets,
    columns,
    fold,
    name_cell,
    paragraph,
    row,
)
from qaudit.report.format import NOT_MEASURED, plural
from qaudit.report.views import View
from qaudit.types import CurvatureRow


def section(view: View) -> Section:
    """Return the section, without blocks if curvature was not measured."""
    models = whole_models(view)
    blocks: list[Block] = []
    if models:
        blocks += [paragraph(_legend(view, models)), paragraph(along_the_series(view))]
        blocks += picture(view, "curvature")
        blocks += [fold("Every subject", *_table(models)), *_roles(view, models)]
    return Section("How sharp the loss is", tuple(blocks), 5)


def _legend(view: View, models: dict[str, CurvatureRow]) -> str:
    one = next(iter(models.values()))
    level = f"{100 * view.audit.plan.recipe.confidence:g}"
    return (
        f"The Hessian of the mean loss of a token, for all parameters, on "
        f"{plural(one.documents, view.unit)} and {plural(one.tokens, 'token')}. Intervals at "
        f"{level} % are over probes and {view.unit}s."
    )


def _table(models: dict[str, CurvatureRow]) -> tuple[Block, ...]:
    names = columns(
        "subject", "trace", "trace, on these documents", "largest eigenvalue", "smallest"
    )
    rows = tuple(
        row(
            name_cell(label),
            interval_text(model.trace_elsewhere),
            interval_text(model.trace),
            digits(model.eigenvalues[0]) if model.eigenvalues else NOT_MEASURED,
            digits(model.smallest),
        )
        for label, model in models.items()
    )
    notes = dict.fromkeys(note for model in models.values() for note in model.notes)
    return (Table(names, rows), *([bullets(*notes)] if notes else []))


def _roles(view: View, models: dict[str, CurvatureRow]) -> tuple[Block, ...]:
    """Return the table of the roles of the last checkpoint, or of the last subject with any."""
    known = [label for label in models if roles_of(view, label)]
    if not known:
        return ()
    last = view.last.label if view.last and view.last.label in known else known[-1]
    whole = models[last].trace.estimate
    rows = tuple(
        row(
            name_cell(role.name),
            interval_text(role.trace),
            f"{100 * role.trace.estimate / whole:.0f}" if whole > 0 else NOT_MEASURED,
            digits(1e6 * role.trace.estimate / role.parameters),
        )
        for role in roles_of(view, last)
    )
    names = columns("role", "trace, over probes", "share, %", "per million parameters")
    return (fold(f"By role, {last}", Table(names, rows)),)
