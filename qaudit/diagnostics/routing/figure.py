"""The share of tokens that each layer sends to other experts, a line for each scheme."""

from __future__ import annotations

from qaudit.diagnostics.routing.section import shown_subject
from qaudit.report.chart import Chart, looks
from qaudit.report.format import percent
from qaudit.report.views import View
from qaudit.types import Interval

NAME = "routing"
ALT = "Share of tokens that each layer sends to other experts than in full precision"
RIGHT = 700.0


def is_drawn(view: View) -> bool:
    return len({row.block for row in view.audit.diagnostics.routing}) > 1


def draw(view: View) -> Chart:
    chart = Chart(ALT, "Bands: intervals over documents, of all layers at once.", 330)
    axes = chart.axes(64, RIGHT, 34, 270, "tokens with other experts, %")
    axes.spines["bottom"].set_visible(True)
    axes.set_xlabel("block")
    rows = [r for r in view.audit.diagnostics.routing if r.subject == shown_subject(view)]
    ends: dict[str, float] = {}
    for k, (scheme, look) in enumerate(looks(view.schemes).items()):
        layers = [row for row in rows if row.scheme == scheme]
        if not layers:
            continue
        chart.names[str(k)] = scheme
        moved = [
            Interval(100 * (1 - at.estimate), 100 * (1 - at.high), 100 * (1 - at.low))
            for at in (row.agreement for row in layers)
        ]
        blocks = [float(row.block) for row in layers]
        chart.curve(axes, str(k), list(zip(blocks, moved, strict=True)), **look)
        tips = [
            f"block {row.block} at {row.scheme}\nsame experts {percent(row.agreement)} %\n"
            f"moved mass {percent(row.moved)} %"
            for row in layers
        ]
        marks = zip(blocks, (interval.estimate for interval in moved), tips, strict=True)
        chart.marks(axes, str(k), marks, **look)
        ends[scheme] = moved[-1].estimate
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.locator_params(axis="x", integer=True)
    chart.names_at(axes, RIGHT, ends)
    return chart
