"""A pick on its own, as text for a terminal and as JSON."""

from __future__ import annotations

from dataclasses import replace

from qaudit.report.format import printable
from qaudit.report.pareto import pareto_table, points
from qaudit.report.terminal import filled
from qaudit.report.verdict import pick_reasons
from qaudit.report.views import View
from qaudit.saved.codec import encode, text_of
from qaudit.types import Audit, Pick


def render_pick(audit: Audit, pick: Pick | None) -> str:
    """Say what to ship and why; the best of every scheme stands beneath."""
    view = View(replace(audit, pick=pick))
    if pick is None:
        said = "Nothing is picked: no measurement meets the objective."
    else:
        said = " ".join(pick_reasons(view))
    return "\n\n".join([filled(said), printable_lines(pareto_table(view))]) + "\n"


def render_pareto(audit: Audit) -> str:
    """Return the best of every scheme, and the front that nothing with fewer bits beats."""
    legend = "A star: nothing with fewer bits is better. Intervals are each one's own."
    return "\n\n".join([printable_lines(pareto_table(View(audit))), legend]) + "\n"


def pick_to_json(audit: Audit, pick: Pick | None) -> str:
    """Write a pick and the best of every scheme under the names they have in an audit."""
    rows = [encode(point) for point in points(View(audit))]
    return text_of({"pick": None if pick is None else encode(pick), "pareto": rows})


def printable_lines(text: str) -> str:
    """Return lines without control characters."""
    return "\n".join(printable(line) for line in text.split("\n"))
