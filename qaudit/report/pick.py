"""A pick on its own, as text for a terminal and as JSON."""

from __future__ import annotations

from dataclasses import replace

from qaudit.report import terminal
from qaudit.report.document import Document, prose
from qaudit.report.pareto import pareto_table, points
from qaudit.report.verdict import pick_reasons
from qaudit.report.views import View
from qaudit.saved.codec import encode, text_of
from qaudit.types import AuditRecord, Pick


def render_pick(audit: AuditRecord, pick: Pick | None) -> str:
    """Return what to ship and why, above the best subject of every scheme."""
    view = View(replace(audit, pick=pick))
    reasons = "Nothing is picked: no measurement meets the objective."
    if pick is not None:
        reasons = " ".join(pick_reasons(view))
    return terminal.render(Document("", prose(reasons), (pareto_table(view),)))


def render_pareto(audit: AuditRecord) -> str:
    """Return the best of every scheme, and the front that nothing with fewer bits beats."""
    headline = "On the front: nothing with fewer bits is better. Intervals are for each loss alone."
    return terminal.render(Document("", prose(headline), (pareto_table(View(audit)),)))


def pick_to_json(audit: AuditRecord, pick: Pick | None) -> str:
    """Write a pick and the best of every scheme under the names they have in an audit."""
    rows = [encode(point) for point in points(View(audit))]
    return text_of({"pick": None if pick is None else encode(pick), "pareto": rows})
