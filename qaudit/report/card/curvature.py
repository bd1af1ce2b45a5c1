"""How sharp the loss is, along the series and by role, and what the way to a quantized model costs.

Beside the section that says why: trace and eigenvalues of every subject that has them, the roles
of the last checkpoint, and slices in a sentence each.
"""

from __future__ import annotations

from qaudit.report.card.series import picture
from qaudit.report.format import NOT_MEASURED, plural
from qaudit.report.markdown import cell, folded, prose, table
from qaudit.report.views import View
from qaudit.saved.curvature import (
    along_the_series,
    beyond_the_parabola,
    digits,
    interval_text,
    roles_of,
    shown_lines,
    whole_models,
)
from qaudit.types import CurvatureRow


def curvature_section(view: View, pictures_at: str | None) -> str:
    """Return the section, empty where nothing of it was measured."""
    models = whole_models(view)
    said = [_legend(view, models), prose(along_the_series(view))] if models else []
    body = [*said, picture(view, "curvature", pictures_at)]
    if models:
        body += [folded("Every subject", _table(models)), _roles(view, models)]
    body += [prose(text) for line in shown_lines(view) if (text := beyond_the_parabola(line))]
    body += [picture(view, "plane", pictures_at)]
    return "\n\n".join(filter(None, body))


def _legend(view: View, models: dict[str, CurvatureRow]) -> str:
    one = next(iter(models.values()))
    level = f"{100 * view.audit.plan.recipe.confidence:g}"
    return prose(
        f"The Hessian of the mean loss of a token, for all parameters, on "
        f"{plural(one.documents, view.unit)} and {plural(one.tokens, 'token')}. Intervals at "
        f"{level} % are over probes and {view.unit}s."
    )


def _table(models: dict[str, CurvatureRow]) -> str:
    header = ["subject", "trace", "trace, on these documents", "largest eigenvalue", "smallest"]
    rows = [
        [
            cell(label),
            interval_text(row.trace_elsewhere),
            interval_text(row.trace),
            digits(row.eigenvalues[0]) if row.eigenvalues else NOT_MEASURED,
            digits(row.smallest),
        ]
        for label, row in models.items()
    ]
    notes = dict.fromkeys(note for row in models.values() for note in row.notes)
    return "\n\n".join([table(header, rows), *(f"- {prose(note)}" for note in notes)])


def _roles(view: View, models: dict[str, CurvatureRow]) -> str:
    """Show which roles of the last checkpoint are sharp, or of the last subject that is known."""
    known = [label for label in models if roles_of(view, label)]
    if not known:
        return ""
    last = view.last.label if view.last and view.last.label in known else known[-1]
    whole = models[last].trace.estimate
    rows = [
        [
            cell(row.name),
            interval_text(row.trace),
            f"{100 * row.trace.estimate / whole:.0f}" if whole > 0 else NOT_MEASURED,
            digits(1e6 * row.trace.estimate / row.parameters),
        ]
        for row in roles_of(view, last)
    ]
    header = ["role", "trace, over probes", "share, %", "per million parameters"]
    return folded(f"By role, {last}", table(header, rows))
