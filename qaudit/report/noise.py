"""What the intervals of an audit are made of, where calibration was drawn several times.

Documents, the draw, and rounding, for each scheme at the last checkpoint: the only one whose
floor is measured. All of the rows, of every subject, stand in `audit.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from qaudit.report import sentences
from qaudit.report.decode import Row
from qaudit.report.format import NOT_MEASURED, percent, points
from qaudit.report.markdown import plain, prose
from qaudit.report.rows import plain_interval, row_of
from qaudit.report.views import View
from qaudit.types import FULL_PRECISION, Audit, Noise


def noise_rows(noise: Sequence[Noise]) -> dict[str, Any]:
    """Return the table `noise` as an audit's diagnostics keep it, if there is anything in it."""
    return {"noise": [{"unit": "fraction", **row_of(row)} for row in noise]} if noise else {}


def noise_of(audit: Audit) -> tuple[Noise, ...]:
    """Return the table `noise` of an audit's diagnostics."""
    if "noise" not in audit.diagnostics:
        return ()
    rows = Row(audit.diagnostics, "audit.diagnostics").rows("noise")
    return tuple(_noise(row) for row in rows)


def _noise(row: Row) -> Noise:
    present = row.value("estimate") is not None
    return row.build(Noise, {"interval": plain_interval(row) if present else None})


def noise_section(view: View) -> str:
    """Say how much of each width is documents, how much the draw, and how much rounding."""
    rows = noise_of(view.audit)
    shown = [row for row in rows if view.last and row.subject == view.last.label]
    drawn = [row for row in shown or rows if row.scheme != FULL_PRECISION]
    if not drawn:
        return ""
    label = drawn[0].subject
    drawn = [row for row in drawn if row.subject == label]
    header = ["", "relative error, %", "documents", "one draw", "rounding"]
    table = tabulate(
        [_cells(row) for row in drawn],
        header,
        tablefmt="pipe",
        disable_numparse=True,
        stralign="left",
    )
    said = sentences.noise_budget(label, drawn, [r for r in shown if r.scheme == FULL_PRECISION])
    return f"{prose(said)}\n\n{table}"


def _cells(row: Noise) -> list[str]:
    share = row.share_of_draw
    return [
        plain(row.scheme),
        NOT_MEASURED if row.interval is None else percent(row.interval),
        _part(row.documents, None if share is None else 1 - share),
        _part(row.draw, share),
        _part(row.numerical, None),
    ]


def _part(part: float | None, share: float | None) -> str:
    """Print a part of a relative error in percentage points, and its share of the width."""
    if part is None:
        return NOT_MEASURED
    return points(part) + ("" if share is None else f" ({100 * share:.0f} %)")
