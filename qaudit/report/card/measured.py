"""What is behind the card's table: every measurement, scheme by scheme."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report import document as doc
from qaudit.report.format import percent, plural, shown, size, spread
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, MeasurementRow

SCHEME_COLUMNS = doc.columns(
    "subject", "loss, nats", "added, nats", "added, %", "perplexity", "bits per byte", "seed"
)


def schemes_section(view: View) -> tuple[doc.Block, ...]:
    """Return one folded table for each scheme, full precision first."""
    return tuple(
        _scheme(view, scheme, rows)
        for scheme in (FULL_PRECISION, *view.schemes)
        if (rows := [row for row in view.audit.measurements if row.scheme == scheme])
    )


def _scheme(view: View, scheme: str, rows: Sequence[MeasurementRow]) -> doc.Block:
    names = SCHEME_COLUMNS if view.draws > 1 else SCHEME_COLUMNS[:-1]
    blocks: list[doc.Block] = [
        doc.Table(names, tuple(_scheme_row(row, len(names)) for row in rows))
    ]
    if scheme != FULL_PRECISION:
        blocks.insert(0, doc.paragraph("In full:", doc.code(rows[0].spec)))
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    blocks += [doc.bullets(*notes)] if notes else []
    many = plural(len(rows), "measurement")
    bits = _range([row.bits_per_weight for row in rows])
    return doc.fold(f"{scheme}: {bits} bits per weight{_whole(rows)}, {many}", *blocks)


def _range(numbers: Sequence[float]) -> str:
    texts = sorted({f"{number:.2f}" for number in numbers}, key=float)
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def _whole(rows: Sequence[MeasurementRow]) -> str:
    """Return the size of the whole model: what is not quantized counts as it is stored."""
    bits = [row.bits_per_parameter for row in rows if row.bits_per_parameter is not None]
    nbytes = [row.nbytes for row in rows if row.nbytes is not None]
    if not bits or not nbytes:
        return ""
    return f", {_range(bits)} per parameter with embeddings and head ({size(max(nbytes))})"


def _scheme_row(row: MeasurementRow, width: int) -> doc.Row:
    change, error = row.absolute_change, row.relative_error
    texts = [
        spread(row.ce),
        shown(change, spread),
        shown(error, percent),
        f"{row.perplexity:.4g}",
        shown(row.bits_per_byte, "{:.4f}".format),
        str(row.calibration_seed),
    ]
    return doc.Row((doc.name_cell(row.subject), *map(doc.cell, texts))[:width])
