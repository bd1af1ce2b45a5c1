"""Loss against bits per weight: what every scheme takes and gives, at its best subject."""

from __future__ import annotations

from qaudit.report.card.series import picture
from qaudit.report.format import listing, loss, spread
from qaudit.report.markdown import cell, folded, plain, prose, table
from qaudit.report.pareto import points
from qaudit.report.views import View


def pareto_section(view: View, pictures_at: str | None) -> str:
    """Name the front, show it, and fold the numbers."""
    if len(view.schemes) < 2:
        return ""
    found = points(view)
    front = [p for p in found if p.on_front]
    said = (
        "Fewest bits first, each better by estimate than all with fewer: "
        + listing([f"{p.scheme} ({p.bits_per_weight:.2f} bits, {loss(p.ce)})" for p in front])
        + ". The loss, in nats per token, is that of the best subject under each scheme."
    )
    rows = [
        [
            f"{p.bits_per_weight:.2f}",
            plain(p.scheme),
            cell(p.subject),
            spread(p.ce),
            "yes" if p.on_front else "",
        ]
        for p in found
    ]
    head = ["bits per weight", "scheme", "best subject", "loss, nats per token", "on the front"]
    folding = folded(f"All {len(found)} schemes", table(head, rows))
    return "\n\n".join(filter(None, [prose(said), picture(view, "pareto", pictures_at), folding]))
