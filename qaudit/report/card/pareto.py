"""Loss against bits per weight: what every scheme takes and gives, at its best subject."""

from __future__ import annotations

from qaudit.report.card.series import picture
from qaudit.report.document import Block, fold, paragraph
from qaudit.report.format import listing, loss
from qaudit.report.pareto import pareto_table, points
from qaudit.report.views import View


def pareto_section(view: View) -> tuple[Block, ...]:
    """Name the front, show it, and fold the numbers."""
    if len(view.schemes) < 2:
        return ()
    every = points(view)
    front = [p for p in every if p.on_front]
    said = (
        "Fewest bits first, each better by estimate than all with fewer: "
        + listing([f"{p.scheme} ({p.bits_per_weight:.2f} bits, {loss(p.ce)})" for p in front])
        + ". The loss, in nats per token, is that of the best subject under each scheme."
    )
    table = fold(f"All {len(every)} schemes", pareto_table(view))
    return (paragraph(said), *picture(view, "pareto"), table)
