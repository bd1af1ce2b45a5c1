"""The share of tokens that each layer sends to other experts, a line for each scheme."""

from __future__ import annotations

from qaudit.diagnostics.routing.section import shown_subject
from qaudit.report.figures import frame
from qaudit.report.figures.drawing import WIDTH, Drawing, Label, Series, line
from qaudit.report.figures.frame import Scale, linear, linear_ticks, widened
from qaudit.report.figures.style import fitted, looks
from qaudit.report.format import percent
from qaudit.report.views import View
from qaudit.types import Interval, RoutingRow

NAME = "routing"
ALT = "Share of tokens that each layer sends to other experts than in full precision"
LEFT, RIGHT, TOP, BOTTOM = 64.0, 700.0, 30.0, 260.0


def is_drawn(view: View) -> bool:
    return len({row.block for row in view.audit.diagnostics.routing}) > 1


def draw(view: View, alt: str) -> Drawing:
    subject = shown_subject(view)
    rows = [row for row in view.audit.diagnostics.routing if row.subject == subject]
    blocks = sorted({row.block for row in rows})
    ticks = tuple(t for t in linear_ticks(blocks[0], blocks[-1], 10) if t == int(t))
    along = Scale(*widened(blocks, 0.03), LEFT, RIGHT, ticks)
    up = linear([0.0, *(b for row in rows for b in _bounds(row))], BOTTOM, TOP)
    parts = [*frame.axis_left(up, LEFT, RIGHT)]
    parts += frame.axis_below(along, BOTTOM, lambda block: f"{block:.0f}", "block")
    parts += [Label("tokens with other experts, %", 0, 12, "faint")]
    ends: dict[str, float] = {}
    for k, (scheme, look) in enumerate(looks(view.schemes).items()):
        layers = [row for row in rows if row.scheme == scheme]
        if not layers:
            continue
        values = [(along.at(row.block), row, Interval(*_bounds(row))) for row in layers]
        curve = frame.curve([(x, value) for x, _, value in values], up, look)
        marks = [
            frame.mark(look.marker, x, up.at(value.estimate), look.colour, _tip(row))
            for x, row, value in values
        ]
        parts.append(Series(str(k), (*curve, *marks)))
        ends[scheme] = up.at(values[-1][2].estimate)
    for scheme, y in frame.at_ends(ends, TOP, BOTTOM).items():
        parts.append(line(RIGHT + 4, ends[scheme], RIGHT + 20, y, "leader"))
        name = fitted(scheme, 0.9 * (WIDTH - RIGHT - 24))
        parts.append(Label(name, RIGHT + 24, y + 4, "strong"))
    note = "Bands: intervals over documents, of all layers at once."
    return Drawing(NAME, ALT, alt, tuple(parts), BOTTOM + 42, note)


def _bounds(row: RoutingRow) -> tuple[float, float, float]:
    same = row.agreement
    return 100 * (1 - same.estimate), 100 * (1 - same.high), 100 * (1 - same.low)


def _tip(row: RoutingRow) -> list[str]:
    same, moved = percent(row.agreement), percent(row.moved)
    return [f"block {row.block} at {row.scheme}", f"same experts {same} %", f"moved mass {moved} %"]
