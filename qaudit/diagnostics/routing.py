"""How often each layer's router chooses other experts than in full precision, and by how much.

Stream and full precision are compared token by token; the unit stays the document. All intervals
of one subject under one scheme hold at once (Bonferroni over its layers).

Routing of the subject that ships under every scheme, and of each layer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qaudit.core import statistics
from qaudit.core.statistics import Array
from qaudit.judge.table import Cell, Measurements, agreement_of
from qaudit.report import document as doc
from qaudit.report.format import or_dash, percent
from qaudit.report.views import View
from qaudit.types import Diagnostics, Finding, Interval, RoutingRow


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    rows = tuple(row for cell in table.cells for row in _rows(table, cell))
    return replace(diagnostics, routing=rows), ()


def _rows(table: Measurements, cell: Cell) -> list[RoutingRow]:
    measured = table.draws(*cell)[0]
    routing = measured.evidence.routing
    if routing is None:
        return []
    tokens = measured.evidence.tokens
    scored = tokens > 0
    count = tokens[scored].astype(np.float64)
    level = statistics.simultaneous(table.confidence, len(routing.blocks))

    def per_token(sums: Array) -> Interval:
        return statistics.interval((sums, count), statistics.per_token, level)

    return [
        RoutingRow(
            subject=cell[0],
            scheme=cell[1],
            spec=measured.spec,
            block=int(block),
            documents=int(scored.sum()),
            tokens=int(tokens.sum()),
            agreement=agreement_of(per_token(count - routing.same[layer, scored])),
            moved=statistics.within(per_token(routing.moved[layer, scored]), 0.0, 1.0),
        )
        for layer, block in enumerate(routing.blocks)
    ]


COLUMNS = ("scheme", "same experts, %", "moved mass, %", "least in block")
LAYERS = ("block", "same experts, %", "moved mass, %")
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
    table = doc.table(COLUMNS, (_row(view, subject, s, rows) for s in schemes))
    main = view.main.scheme if view.main and view.main.scheme in schemes else schemes[0]
    layers = (
        (str(row.block), percent(row.agreement), percent(row.moved))
        for row in rows
        if row.scheme == main
    )
    fold = doc.fold(f"{subject} at {main}, layer by layer", doc.table(LAYERS, layers))
    return doc.Section("Routing", (doc.paragraph(LEGEND), table, fold), 4)


def shown_subject(view: View) -> str | None:
    """Return the subject that ships, or the last one with experts."""
    subjects = list(dict.fromkeys(row.subject for row in view.audit.diagnostics.routing))
    if view.main and view.main.subject in subjects:
        return view.main.subject
    return subjects[-1] if subjects else None


def _row(view: View, subject: str, scheme: str, rows: list[RoutingRow]) -> doc.Cells:
    score = view.score(subject, scheme)
    layers = [row for row in rows if row.scheme == scheme]
    least = min(layers, key=lambda row: row.agreement.estimate)
    return (
        scheme,
        or_dash(score.routing_agreement if score else None, percent),
        or_dash(score.routing_moved if score else None, percent),
        f"{least.block}: {percent(least.agreement)}",
    )
