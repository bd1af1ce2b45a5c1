"""Routing of the subject that ships under every scheme, and of each layer."""

from __future__ import annotations

from qaudit.report import document as doc
from qaudit.report.format import percent, shown
from qaudit.report.series import picture
from qaudit.report.views import View
from qaudit.types import RoutingRow

COLUMNS = doc.columns("scheme", "same experts, %", "moved mass, %", "least in block")
LAYERS = doc.columns("block", "same experts, %", "moved mass, %")
LEGEND = (
    "Routers are left as they are, and read what quantized blocks return. Same experts: at how "
    "many tokens a layer chooses the set of experts that it chooses in full precision, a mean over "
    "layers. Moved mass: the part of the routing weights that is on other experts than there."
)


def section(view: View) -> doc.Section:
    subject = shown_subject(view)
    rows = [row for row in view.audit.diagnostics.routing if row.subject == subject]
    if subject is None or not rows:
        return doc.Section("Routing", (), 4)
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    table = doc.TableBlock(COLUMNS, tuple(_row(view, subject, s, rows) for s in schemes))
    main = view.main.scheme if view.main and view.main.scheme in schemes else schemes[0]
    layers = tuple(
        doc.row(str(row.block), percent(row.agreement), percent(row.moved))
        for row in rows
        if row.scheme == main
    )
    fold = doc.fold(f"{subject} at {main}, layer by layer", doc.TableBlock(LAYERS, layers))
    return doc.Section(
        "Routing", (doc.paragraph(LEGEND), table, *picture(view, "routing"), fold), 4
    )


def shown_subject(view: View) -> str | None:
    """Return the subject that ships, or the last one with experts."""
    subjects = list(dict.fromkeys(row.subject for row in view.audit.diagnostics.routing))
    if view.main and view.main.subject in subjects:
        return view.main.subject
    return subjects[-1] if subjects else None


def _row(view: View, subject: str, scheme: str, rows: list[RoutingRow]) -> doc.TableRow:
    score = view.score(subject, scheme)
    layers = [row for row in rows if row.scheme == scheme]
    least = min(layers, key=lambda row: row.agreement.estimate)
    return doc.row(
        scheme,
        shown(score.routing_agreement if score else None, percent),
        shown(score.routing_moved if score else None, percent),
        f"{least.block}: {percent(least.agreement)}",
    )
