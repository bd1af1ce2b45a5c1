"""The ranking of shipped files: bytes, KL divergence, what dominates them, what was seen."""

from __future__ import annotations

from qaudit.report.document import (
    Block,
    Inline,
    Section,
    TableBlock,
    TableRow,
    bullets,
    cell,
    code,
    columns,
    interval_cell,
    name_cell,
    paragraph,
    prose,
    words,
)
from qaudit.report.format import NOT_MEASURED, listing, percent, shown, size, spread
from qaudit.report.views import View
from qaudit.types import ShippedRow

COLUMNS = columns(
    "file", "format", "size", "KL, nats", "added loss, nats", "agreement, %", "dominated by"
)
LEGEND = (
    "Files in the order of their KL divergence to the base. A file is dominated by one, or by a "
    "scheme, that takes no more bytes and diverges less, paired by document and in all pairs at "
    "once."
)


def section(view: View) -> Section:
    rows = view.audit.diagnostics.shipped
    damaged = _damaged(view)
    blocks: list[Block] = []
    if rows:
        table = TableBlock(COLUMNS, tuple(_row(view, row) for row in rows), name="shipped")
        blocks += [paragraph(LEGEND), table]
    blocks += [bullets(*damaged)] if damaged else []
    return Section("Shipped files", tuple(blocks), 3)


def _damaged(view: View) -> list[Inline]:
    labels = {shipped.label for shipped in view.audit.plan.shipped}
    seen = [
        (row.scheme, note) for row in view.audit.diagnostics.shipped for note in row.looks_broken
    ]
    seen += [
        (skipped.scheme, f"was not read: {skipped.reason}")
        for skipped in view.audit.skipped
        if skipped.scheme in labels
    ]
    return [(*code(name), *words(" "), *prose(note), *words(".")) for name, note in seen]


def _row(view: View, one: ShippedRow) -> TableRow:
    score = view.score(one.subject, one.scheme)
    bits = shown(one.bits, str)
    return TableRow(
        (
            name_cell(one.scheme),
            cell(f"{one.format or NOT_MEASURED}, {bits}-bit"),
            cell(shown(one.nbytes, size)),
            interval_cell(shown(one.kl, spread)),
            interval_cell(shown(score.absolute_change if score else None, spread)),
            interval_cell(shown(score.top1_agreement if score else None, percent)),
            cell(listing(list(one.dominated_by)) if one.dominated_by else "-"),
        )
    )
