"""What the intervals of an audit are made of, as rows of its diagnostics and back.

Documents, the draw, and rounding, where calibration was drawn several times; the floor of
rounding is measured at the last checkpoint alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qaudit.saved.decode import Row
from qaudit.saved.rows import plain_interval, row_of
from qaudit.types import Audit, Noise


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
