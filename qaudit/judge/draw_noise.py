"""What another draw of calibration text moves a measurement by: which draws tell it of which cell.

A cell is a subject under a scheme. Draws of different cells are independent, whatever their seeds:
the same text moves two models differently. What a draw does is taken from

1. the cell's own draws, where there are several, moderated by all other drawn cells: these are a
   prior, scaled by the power 0.65 of the added losses (`core.draws.moderated`).
2. otherwise all cells that were drawn several times at the same scheme, together. Each estimate has
   few degrees of freedom; together they have more.
3. otherwise the cells of another scheme that calibrates, and of several schemes the one that makes
   the most of it.
4. otherwise nothing is known, and the interval covers documents alone (`without_draws`).

What a draw moves grows with the damage, more slowly than in proportion: over 15 subjects of the
demo at gptq-3bit, which adds 0.6 to 6.9 % of their losses, with the power 0.31 +- 0.16 of the added
loss, and 0.60 +- 0.16 in a recording before it. So it is carried over by the ratio of the added
losses to a cell with more damage, and by its cube root to one with less, which is the wider of both
(`carried`). Of intervals of one draw, widened by those of two others, 95 to 99 % hold; as a
fraction of the loss 90 % of those with more damage, in proportion alone 71 % of those with less
(`benchmarks.damage`).

A scheme that does not calibrate has no such noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from qaudit.core import statistics
from qaudit.core.draws import DrawNoise, combined, draw_noise, moderated
from qaudit.core.keys import first_of
from qaudit.core.statistics import Array
from qaudit.judge.table import Cell, Measurements, Sums, losses
from qaudit.types import FULL_PRECISION, AuditRecord

POWER = 0.65
"""Of the added loss, with which the standard deviation of a draw grows."""


@dataclass(frozen=True)
class KnownNoise:
    """The noise of a cell's draw, as a fraction of its total, and whose draws tell it."""

    noise: DrawNoise
    source: str | None  # None: the cell's own are among them


def noise_in(known: KnownNoise | None) -> DrawNoise | None:
    """Return the noise alone, without its source."""
    return known.noise if known else None


@dataclass(frozen=True)
class _SchemeNoise:
    """What is known from all cells of a scheme that were drawn several times."""

    labels: tuple[str, ...]
    parts: tuple[tuple[DrawNoise, float | None], ...]  # of each, and its damage
    source: str

    def at(self, damage: float | None) -> DrawNoise:
        noise = combined([carried(noise, own, damage) for noise, own in self.parts])
        return replace(noise, origin=tuple(noise for noise, _ in self.parts))


def carried(noise: DrawNoise, damage: float | None, other: float | None) -> DrawNoise:
    """Return the noise of a cell with other damage; without one of the two it is the same."""
    if not damage or other is None:
        return noise
    ratio = other / damage
    return noise.times(max(ratio, math.cbrt(ratio)))


def noise_of(
    table: Measurements, cell: Cell, split: str | None = None, sums: Sums = losses
) -> KnownNoise | None:
    """Return the noise of a cell's draw on the documents of a split; None where it has none."""
    draws = table.draws(*cell)
    noises = _by_scheme(table, split, sums)
    if not noises or not draws or not (len(draws) > 1 or draws[0].calibrates):
        return None
    damage = _damage(table, cell, split, sums)
    column_RD = column_of(table, cell, split, sums) if len(draws) > 1 else None
    drawn = None if column_RD is None else draw_noise(column_RD)
    if drawn is not None:
        return KnownNoise(moderated(drawn, _others(noises, cell, damage)), None)
    noise = noises.get(cell[1])
    if noise is not None:
        return KnownNoise(noise.at(damage), noise.source)
    scaled = [
        KnownNoise(other.at(damage), f"{other.source}, by added loss") for other in noises.values()
    ]
    return max(scaled, key=lambda one: one.noise.variance)


def _others(
    noises: Mapping[str, _SchemeNoise], cell: Cell, damage: float | None
) -> list[DrawNoise]:
    """Return the noises of all other drawn cells, scaled to the damage of this one."""
    return [
        noise.times((damage / other) ** POWER) if damage and other else noise
        for scheme, known in noises.items()
        for label, (noise, other) in zip(known.labels, known.parts, strict=True)
        if (label, scheme) != cell
    ]


@lru_cache(maxsize=8)
def _by_scheme(table: Measurements, split: str | None, sums: Sums) -> dict[str, _SchemeNoise]:
    drawn: dict[str, list[tuple[str, int, DrawNoise, float | None]]] = {}
    for cell in table.cells:
        column_RD = column_of(table, cell, split, sums)
        noise = None if column_RD is None else draw_noise(column_RD)
        if noise is not None and column_RD is not None:
            damage = _damage(table, cell, split, sums)
            drawn.setdefault(cell[1], []).append((cell[0], len(column_RD), noise, damage))
    return {scheme: _together(scheme, cells) for scheme, cells in drawn.items()}


def _together(scheme: str, cells: list[tuple[str, int, DrawNoise, float | None]]) -> _SchemeNoise:
    whose = first_of([label for label, *_ in cells], 1)
    return _SchemeNoise(
        tuple(label for label, *_ in cells),
        tuple((noise, damage) for *_, noise, damage in cells),
        f"{whose} at {scheme}, {max(draws for _, draws, *_ in cells)} draws",
    )


def column_of(
    table: Measurements, cell: Cell, split: str | None = None, sums: Sums = losses
) -> Array | None:
    """Return a cell's sums, (draws, documents); None where one is missing or not finite."""
    draws = table.draws(*cell)
    rows = [sums(m.evidence) for m in draws]
    if not rows or not all(bool(np.isfinite(row).all()) for row in rows):
        return None
    scored = table.scored(split)
    return np.stack([row[scored].astype(np.float64) for row in rows])


def _damage(table: Measurements, cell: Cell, split: str | None, sums: Sums) -> float | None:
    """Return how much of a cell's total quantization may have changed, by the interval's far end.

    So damage that is uncertain or near zero has noise. KL divergence and its like are nothing in
    full precision, and a draw moves them in proportion to themselves: all of it was added.
    """
    if sums is not losses:
        return None
    own, full = (column_of(table, (cell[0], s), split) for s in (cell[1], FULL_PRECISION))
    if own is None or full is None:
        return None
    added = statistics.interval((own.mean(axis=0), full[0]), lambda total: 1 - total[1] / total[0])
    far = max(abs(added.low), abs(added.high))
    return far if math.isfinite(far) else None


def without_draws(audit: AuditRecord) -> tuple[Cell, ...]:
    """Return the cells whose intervals leave out the draw that a claim about a method needs."""
    if audit.plan.claim == "file":
        return ()
    pooled = {(row.subject, row.scheme) for row in audit.pooled}
    rows = {(row.subject, row.scheme): row for row in audit.measurements}
    return tuple(cell for cell, row in rows.items() if cell not in pooled and row.calibrates)
