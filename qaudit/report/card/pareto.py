"""Loss against bits per weight: what every scheme takes and gives, at its best subject."""

from __future__ import annotations

from qaudit.report.card.series import picture
from qaudit.report.document import Block, Table, columns, fold, name_cell, paragraph, row
from qaudit.report.format import listing, loss, spread
from qaudit.report.pareto import points
from qaudit.report.views import View

COLUMNS = columns(
    "bits per weight", "scheme", "best subject", "loss, nats per token", "on the front"
)


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
    rows = tuple(
        row(
            f"{p.bits_per_weight:.2f}",
            p.scheme,
            name_cell(p.subject),
            spread(p.ce),
            "yes" if p.on_front else "",
        )
        for p in every
    )
    table = fold(f"All {len(every)} schemes", Table(COLUMNS, rows))
    return (paragraph(said), *picture(view, "pareto"), table)
