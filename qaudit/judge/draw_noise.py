"""What another draw of calibration text moves a measurement by: which draws tell it of which cell.

A cell is a subject under a scheme. Draws of different cells are independent, whatever their seeds:
the same text moves two models differently. What a draw does is taken from

1. all cells that were drawn several times at the same scheme, together, as a fraction of their
   loss. Each estimate has few degrees of freedom; together they have more.
2. otherwise the cells of another scheme that calibrates. 3 bits lose more than 4 and scatter more,
   so that what a draw moves is taken as a share of what quantization adds to the loss, and of
   several schemes the one with the largest share.
3. otherwise nothing is known, and the interval covers documents alone (`without_draws`).

A scheme that does not calibrate has no such noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from qaudit.core import statistics
from qaudit.core.draws import DrawNoise, combined, draw_noise
from qaudit.core.registry import kind_of
from qaudit.core.scheme import Calibration
from qaudit.core.statistics import Array
from qaudit.judge.table import Cell, Sums, Table, losses
from qaudit.types import FULL_PRECISION, AuditRecord


@cache
def calibrates(spec: str) -> bool:
    """Whether a scheme's result depends on the calibration text, by its canonical form."""
    kind = kind_of(spec)  # None: full precision, or a scheme of a later version
    return kind is not None and kind[0].calibration is not Calibration.NONE


@dataclass(frozen=True)
class KnownNoise:
    """The noise of a cell's draw, as a fraction of its total, and whose draws tell it."""

    noise: DrawNoise
    source: str | None  # None: the cell's own are among them


@dataclass(frozen=True)
class _SchemeNoise:
    """What is known from all cells of a scheme that were drawn several times."""

    noise: DrawNoise
    share: float | None  # of the total that quantization added; None where it may be nothing
    source: str


def noise_of(
    table: Table, cell: Cell, split: str | None = None, sums: Sums = losses
) -> KnownNoise | None:
    """Return the noise of a cell's draw on the documents of a split; None where it has none."""
    draws = table.draws(*cell)
    known = _by_scheme(table, split, sums)
    if not known or not draws or not (len(draws) > 1 or calibrates(draws[0].spec)):
        return None
    own = known.get(cell[1])
    if own is not None:
        return KnownNoise(own.noise, None if len(draws) > 1 else own.source)
    share = _added(table, cell, split, sums)
    scaled = [
        KnownNoise(one.noise.times(abs(share or 0.0) / one.share), f"{one.source}, by added loss")
        if share is not None and one.share is not None
        else KnownNoise(one.noise, one.source)
        for one in known.values()
    ]
    return max(scaled, key=lambda one: one.noise.variance)


@lru_cache(maxsize=8)
def _by_scheme(table: Table, split: str | None, sums: Sums) -> dict[str, _SchemeNoise]:
    drawn: dict[str, list[tuple[str, int, DrawNoise, float | None]]] = {}
    for cell in dict.fromkeys((m.subject, m.scheme) for m in table.measurements):
        column_RD = column_of(table, cell, split, sums)
        noise = None if column_RD is None else draw_noise(column_RD)
        if noise is not None and column_RD is not None:
            share = _added(table, cell, split, sums, certain=True)
            drawn.setdefault(cell[1], []).append((cell[0], len(column_RD), noise, share))
    return {scheme: _together(scheme, cells) for scheme, cells in drawn.items()}


def _together(scheme: str, cells: list[tuple[str, int, DrawNoise, float | None]]) -> _SchemeNoise:
    shares = [share for *_, share in cells if share is not None]
    labels = [f"`{label}`" for label, *_ in cells]
    whose = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
    return _SchemeNoise(
        combined([noise for _, _, noise, _ in cells]),
        float(np.mean(shares)) if len(shares) == len(cells) else None,
        f"{whose} at {scheme}, {max(draws for _, draws, *_ in cells)} draws",
    )


def column_of(
    table: Table, cell: Cell, split: str | None = None, sums: Sums = losses
) -> Array | None:
    """Return a cell's sums, (draws, documents); None where one is missing or not finite."""
    draws = table.draws(*cell)
    rows = [sums(m.evidence) for m in draws]
    if not rows or not all(bool(np.isfinite(row).all()) for row in rows):
        return None
    scored = table.scored(split)
    return np.stack([row[scored].astype(np.float64) for row in rows])


def _added(
    table: Table, cell: Cell, split: str | None, sums: Sums, *, certain: bool = False
) -> float | None:
    """Return the share of a cell's total that quantization added.

    KL divergence and its like are nothing in full precision: all of it was added.
    """
    if sums is not losses:
        return 1.0
    own, full = (column_of(table, (cell[0], s), split) for s in (cell[1], FULL_PRECISION))
    if own is None or full is None:
        return None
    added = statistics.interval((own.mean(axis=0), full[0]), lambda total: 1 - total[1] / total[0])
    return None if certain and not added.low > 0 else added.estimate


def without_draws(audit: AuditRecord) -> tuple[Cell, ...]:
    """Return the cells whose intervals leave out the draw of their calibration text."""
    pooled = {(row.subject, row.scheme) for row in audit.pooled}
    cells = {(row.subject, row.scheme): row.spec for row in audit.measurements}
    return tuple(cell for cell, spec in cells.items() if cell not in pooled and calibrates(spec))
