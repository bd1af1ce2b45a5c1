"""KL divergence of files and schemes, a row for each, the smallest file lowest."""

from __future__ import annotations

import math

from qaudit.diagnostics.shipped.judge import is_shipped
from qaudit.report.chart import COLOURS, Chart
from qaudit.report.format import size, spread
from qaudit.report.plots import interval_across, rows_of
from qaudit.report.views import View
from qaudit.types import MeasurementRow

NAME = "shipped"
ALT = "KL divergence of shipped files against their bytes"


def is_drawn(view: View) -> bool:
    """Return whether there is a file with a place in the picture."""
    return any(is_shipped(score.spec) for score in _with_bytes(view))


def draw(view: View) -> Chart:
    scores = sorted(_with_bytes(view), key=lambda score: -(score.nbytes or 0))
    broken = {row.scheme for row in view.audit.diagnostics.shipped if row.looks_broken}
    note = "Filled: nothing with fewer bytes diverges less, by estimate. Circle: a file; square: a "
    note += "scheme. Lines: intervals over documents."
    note += f" A cross: looks broken ({len(broken)})." if broken else ""
    chart = Chart(ALT, note, 66 + 20 * len(scores))
    names = [f"{score.scheme}, {size(score.nbytes or 0)}" for score in scores]
    axes = rows_of(chart, (260, 830), 10, names)
    axes.set_xlabel("KL divergence to the base, nats per token")
    for y, score in enumerate(scores):
        assert score.kl is not None and score.nbytes is not None
        kind = int(not is_shipped(score.spec))
        tip = f"{score.scheme}\n{size(score.nbytes)}, KL {spread(score.kl)} nats per token"
        tip += "\nlooks broken" if score.scheme in broken else ""
        marker = "X" if score.scheme in broken else "os"[kind]
        on_front = not any(_is_better(other, score) for other in scores)
        interval_across(axes, y, score.kl, color=COLOURS[kind])
        look = {"marker": marker, "color": COLOURS[kind]}
        chart.marks(axes, "0", [(score.kl.estimate, y, tip)], filled=on_front, **look)
    lows = [s.kl.low for s in scores if s.kl and s.kl.low > 0]
    highs = [s.kl.high for s in scores if s.kl and math.isfinite(s.kl.high)]
    if lows and len(lows) == len(scores) and max(highs, default=0.0) > 20 * min(lows):
        axes.set_xscale("log")
    return chart


def _with_bytes(view: View) -> list[MeasurementRow]:
    """Return the rows with bytes and a KL divergence, of bases that have files."""
    scores = [
        score
        for base in {row.subject for row in view.audit.diagnostics.shipped}
        for scheme in view.schemes
        if (score := view.score(base, scheme)) is not None
    ]
    return [s for s in scores if s.nbytes and s.kl and 0 < s.kl.estimate < math.inf]


def _is_better(score: MeasurementRow, other: MeasurementRow) -> bool:
    assert score.kl and other.kl and score.nbytes and other.nbytes
    return score.nbytes <= other.nbytes and score.kl.estimate < other.kl.estimate
