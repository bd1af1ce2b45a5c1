"""Every measurement, folded scheme by scheme, with the scheme in full and its notes."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.report.document import (
    Block,
    Row,
    Table,
    bullets,
    cell,
    code,
    columns,
    fold,
    name_cell,
    paragraph,
)
from qaudit.report.format import NOT_MEASURED, percent, plural, spread
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, MeasurementRow

COLUMNS = columns(
    "subject", "loss, nats", "added, nats", "added, %", "perplexity", "bits per byte", "seed"
)


def schemes_section(view: View) -> tuple[Block, ...]:
    """Return one folded table for each scheme, full precision first."""
    return tuple(
        _scheme(view, scheme, rows)
        for scheme in (FULL_PRECISION, *view.schemes)
        if (rows := [row for row in view.audit.measurements if row.scheme == scheme])
    )


def _scheme(view: View, scheme: str, rows: Sequence[MeasurementRow]) -> Block:
    shown = COLUMNS if view.draws > 1 else COLUMNS[:-1]
    blocks: list[Block] = [Table(shown, tuple(_row(row, len(shown)) for row in rows))]
    if scheme != FULL_PRECISION:
        blocks.insert(0, paragraph("In full:", code(rows[0].spec)))
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    blocks += [bullets(*notes)] if notes else []
    many = plural(len(rows), "measurement")
    return fold(f"{scheme}: {_bits(rows)} bits per weight, {many}", *blocks)


def _bits(rows: Sequence[MeasurementRow]) -> str:
    bits = sorted({f"{row.bits_per_weight:.2f}" for row in rows}, key=float)
    return bits[0] if len(bits) == 1 else f"{bits[0]} to {bits[-1]}"


def _row(row: MeasurementRow, width: int) -> Row:
    change, error = row.absolute_change, row.relative_error
    texts = [
        spread(row.ce),
        NOT_MEASURED if change is None else spread(change),
        NOT_MEASURED if error is None else percent(error),
        f"{row.perplexity:.4g}",
        NOT_MEASURED if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}",
        str(row.calibration_seed),
    ]
    return Row((name_cell(row.subject), *map(cell, texts))[:width])
