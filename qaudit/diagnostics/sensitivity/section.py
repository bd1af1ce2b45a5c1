"""What each role adds to the loss, in the section `Why`: for the pick and the last checkpoint.

Other subjects and groups of layers are in `audit.json`.
"""

from __future__ import annotations

from qaudit.report import document as doc
from qaudit.report.format import listing, percent, plural, shown, spread
from qaudit.report.views import View
from qaudit.types import SensitivityRow

COLUMNS = doc.columns("role", "adds, nats per token", "share, %")


def section(view: View) -> doc.Section:
    rows = view.audit.diagnostics.sensitivity
    blocks = [block for label in view.of_interest for block in _subject(label, rows)]
    return doc.Section("Why", tuple(blocks), 4)


def _subject(label: str, rows: tuple[SensitivityRow, ...]) -> list[doc.Block]:
    rows_of_subject = [row for row in rows if row.subject == label]
    lowest = min((row.bits for row in rows_of_subject if row.bits is not None), default=None)
    alone = [row for row in rows_of_subject if row.part == "role" and row.bits == lowest]
    if not alone:
        return []
    legend = (
        f"What each role of `{label}` adds to the loss when it alone is quantized at "
        f"{alone[0].scheme}, and its share of the sum over all roles."
    )
    cells = tuple(
        doc.row(
            doc.name_cell(row.name), shown(row.absolute_change, spread), shown(row.share, percent)
        )
        for row in alone
    )
    return [
        doc.paragraph(legend),
        doc.TableBlock(COLUMNS, cells),
        *map(doc.paragraph, _mixture(rows_of_subject)),
    ]


def _mixture(added: list[SensitivityRow]) -> list[str]:
    whole = {row.bits: row for row in added if row.part == "all"}
    mixed = next((row for row in added if row.part == "mixture"), None)
    if mixed is None or mixed.absolute_change is None or mixed.predicted is None:
        return []
    by_bits: dict[int, list[str]] = {}
    for role, bits in mixed.mixture.items():
        by_bits.setdefault(bits, []).append(f"`{role}`")
    mixture = listing([f"{bits} bits for {listing(by_bits[bits])}" for bits in sorted(by_bits)])
    rivals = [
        f"all at {bits} bits ({row.bits_per_weight:.2f}) {spread(row.absolute_change)}"
        for bits, row in sorted(whole.items(), key=lambda item: item[0] or 0)
        if row.absolute_change is not None
    ]
    beside = f"; {' and '.join(rivals)}" if rivals else ""
    return [
        f"Suggested within {mixed.budget or mixed.bits_per_weight:.2f} bits per weight: {mixture}. "
        f"Measured on {plural(mixed.documents, 'document')}, at {mixed.bits_per_weight:.2f} bits "
        f"per weight it adds {spread(mixed.absolute_change)} nats per token, where the sum of its "
        f"parts predicts {mixed.predicted:.3f}{beside}. All of these are calibrated on the "
        "full-precision model."
    ]
