"""Bytes against KL divergence, with intervals: low and left is good."""

from __future__ import annotations

import math

from qaudit.diagnostics.shipped.judge import is_shipped
from qaudit.report.figures import frame
from qaudit.report.figures.drawing import Drawing, Label, Series
from qaudit.report.figures.frame import Scale, linear_or_log, linear_ticks, log_ticks
from qaudit.report.figures.spots import Spot, drawn, height_for
from qaudit.report.figures.style import Look, looks
from qaudit.report.format import size, spread
from qaudit.report.views import View
from qaudit.types import MeasurementRow

NAME = "shipped"
ALT = "KL divergence of shipped files against their bytes"
LEFT, RIGHT, TOP = 64.0, 840.0, 30.0


def is_drawn(view: View) -> bool:
    """Return whether there is a file with a place in the picture."""
    return any(is_shipped(score.spec) for score in _shown(view))


def draw(view: View, alt: str) -> Drawing:
    shown = _shown(view)
    spots = [_spot(view, score, shown) for score in shown]
    nbytes = [spot.across for spot in spots]
    bottom = TOP + height_for(spots)
    low, high = min(nbytes) / 1.12, max(nbytes) * 1.6  # names are at the right of their marks
    ticks = _size_ticks(low, max(nbytes) * 1.12)
    across = Scale(low, high, LEFT, RIGHT, tuple(ticks), math.log)
    bounds = [b for s in spots if s.interval for b in (s.interval.low, s.interval.high) if b > 0]
    up = linear_or_log([*(spot.up for spot in spots), *bounds], bottom, TOP)
    parts = (
        *frame.axis_left(up, LEFT, RIGHT),
        *frame.axis_below(across, bottom, lambda nbytes: size(int(nbytes)), "size of all tensors"),
        Label("KL divergence to the base, nats per token", 0, 12, "faint"),
        *drawn(spots, across, up),
    )
    note = "Filled, and joined by the line: nothing with fewer bytes diverges less, by estimate. "
    note += "Whiskers: intervals over documents."
    if broken := sum(bool(row.looks_broken) for row in view.audit.diagnostics.shipped):
        note += f" A cross: looks broken ({broken})."
    return Drawing(NAME, ALT, alt, (Series("0", parts),), bottom + 42, note)


def _shown(view: View) -> list[MeasurementRow]:
    """Return the rows with bytes and a KL divergence, of bases that have files."""
    scores = [
        score
        for base in {row.subject for row in view.audit.diagnostics.shipped}
        for scheme in view.schemes
        if (score := view.score(base, scheme)) is not None
    ]
    return [s for s in scores if s.nbytes and s.kl and 0 < s.kl.estimate < math.inf]


def _spot(view: View, score: MeasurementRow, shown: list[MeasurementRow]) -> Spot:
    assert score.kl is not None and score.nbytes is not None
    broken = any(
        row.looks_broken for row in view.audit.diagnostics.shipped if row.scheme == score.scheme
    )
    kind = "file" if is_shipped(score.spec) else "scheme"
    look = looks(("file", "scheme"))[kind]
    return Spot(
        score.scheme,
        score.nbytes,
        score.kl.estimate,
        not any(_is_better(other, score) for other in shown),
        Look(look.colour, "X") if broken else look,
        (
            score.scheme,
            f"{size(score.nbytes)}, KL {spread(score.kl)} nats per token",
            "looks broken" if broken else "",
        ),
        score.kl,
    )


def _is_better(one: MeasurementRow, other: MeasurementRow) -> bool:
    assert one.kl and other.kl and one.nbytes and other.nbytes
    return one.nbytes <= other.nbytes and one.kl.estimate < other.kl.estimate


def _size_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 of decades where sizes are far apart, else equal steps."""
    ticks = log_ticks(low, high)
    return ticks if len(ticks) > 2 else linear_ticks(low, high)
