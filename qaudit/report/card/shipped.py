"""Files that are quantized already: bytes against KL divergence, and which is dominated."""

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
    interval_cell,
    name_cell,
    paragraph,
    prose,
    words,
)
from qaudit.report.format import NOT_MEASURED, percent, shown, size, spread
from qaudit.report.views import View
from qaudit.types import MeasurementRow

COLUMNS = columns(
    "file", "format", "size", "KL, nats", "added loss, nats", "agreement, %", "dominated by"
)
LEGEND = (
    "Files in the order of their KL divergence to the base. A file is dominated by one that takes "
    "no more bytes and has a lower KL divergence, with intervals that do not overlap."
)
_BROKEN = "looks broken"


def shipped_section(view: View) -> tuple[Block, ...]:
    """Return the ranking of shipped files; qaudit's own schemes may dominate them too."""
    labels = {one.label for one in view.audit.plan.shipped}
    scores = [
        score
        for subject in view.subjects
        for scheme in view.schemes
        if (score := view.score(subject.label, scheme)) is not None
    ]
    files = sorted((one for one in scores if one.scheme in labels), key=_divergence)
    if not files:
        return ()
    rows = tuple(_row(one, scores) for one in files)
    broken = [
        (*code(one.scheme), *words(" "), *prose(note), *words("."))
        for one in files
        for note in one.notes
        if note.startswith(_BROKEN)
    ]
    blocks: list[Block] = [paragraph(LEGEND), Table(COLUMNS, rows, name="shipped")]
    return (*blocks, *((bullets(*broken),) if broken else ()))


def _divergence(score: MeasurementRow) -> float:
    return score.kl.estimate if score.kl else float("inf")


def _row(score: MeasurementRow, scores: Sequence[MeasurementRow]) -> Row:
    better = [one.scheme for one in scores if dominates(one, score)]
    change, agreement = score.absolute_change, score.top1_agreement
    return Row(
        (
            name_cell(score.scheme),
            cell(_format(score.spec)),
            cell(shown(score.nbytes, size)),
            interval_cell(shown(score.kl, spread)),
            interval_cell(shown(change, spread)),
            interval_cell(shown(agreement, percent)),
            cell(", ".join(better) or "-"),
        )
    )


def dominates(one: MeasurementRow, other: MeasurementRow) -> bool:
    """Return whether a measurement takes no more bytes and clearly diverges less."""
    if one.nbytes is None or other.nbytes is None or one.kl is None or other.kl is None:
        return False
    return one.nbytes <= other.nbytes and one.kl.high < other.kl.low


def _format(spec: str) -> str:
    """Return the format and the bits that the canonical form of a file names."""
    pairs = dict(pair.split("=", 1) for pair in spec.split(":") if "=" in pair)
    return f"{pairs.get('format', NOT_MEASURED)}, {pairs.get('bits', NOT_MEASURED)}-bit"
