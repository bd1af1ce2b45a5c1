"""What figures are made of: scales, axes, marks, and the frame around a drawing.

Coordinates are pixels of a drawing 860 wide, which the browser scales. A mark that has no finite
place is left out; an interval that leaves the scale ends at its edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qaudit.report.elements import EMPTY, Html, Value, element, joined, text
from qaudit.report.looks import LINES, METHOD_COLOURS, Line

WIDTH = 860
SHAPES = {
    "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "s": "M-3.6-3.6h7.2v7.2h-7.2z",
    "^": "M0-4.6 4.4 3.4h-8.8z",
    "v": "M0 4.6 4.4-3.4h-8.8z",
    "<": "M-4.6 0 3.4-4.4v8.8z",
    ">": "M4.6 0-3.4-4.4v8.8z",
    "D": "M0-5 5 0 0 5-5 0z",
    "P": "M-1.6-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3z",
    "X": "M-4.4-2 -2-4.4 0-2.4 2-4.4 4.4-2 2.4 0 4.4 2 2 4.4 0 2.4-2 4.4-4.4 2-2.4 0z",
    "p": "M0-4.8 4.6-1.5 2.8 3.9h-5.6L-4.6-1.5z",
    "*": "M0-7.5 1.8-2.4 7.1-2.3 2.9 1 4.4 6.1 0 3.1-4.4 6.1-2.9 1-7.1-2.3-1.8-2.4z",
}


@dataclass(frozen=True)
class Scale:
    """From numbers to pixels; `forward` makes the numbers straight."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...] = ()
    forward: Callable[[float], float] = float

    def at(self, value: float) -> float:
        """Return where a number stands, at an edge where it lies beyond."""
        low, high = self.forward(self.low), self.forward(self.high)
        straight = self.forward(min(max(value, self.low), self.high))
        share = (straight - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)


def mixed(straight: float) -> Callable[[float], float]:
    """Return what makes a scale straight up to a number and logarithmic beyond."""

    def forward(value: float) -> float:
        if abs(value) <= straight:
            return value / straight
        return math.copysign(1 + math.log10(abs(value) / straight), value)

    return forward


def widened(values: Sequence[float], by: float = 0.05) -> tuple[float, float]:
    """Return the ends of finite numbers with some room on both sides."""
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    room = by * (high - low) or abs(high) * by or 1.0
    return low - room, high + room


def colour(shade: str) -> str:
    """Return the class of a colour."""
    return f"c{METHOD_COLOURS.index(shade)}" if shade in METHOD_COLOURS else "ink"


def stroke(shade: str, line: Line = "-") -> str:
    """Return the classes of a line."""
    return f"{colour(shade)} d{LINES.index(line)}"


def definitions() -> Html:
    """Return the shapes of marks, once for the whole page."""
    shapes = (element("path", id=f"m{k}", d=d) for k, d in enumerate(SHAPES.values()))
    return element(
        "svg", element("defs", *shapes), width=0, height=0, aria_hidden="true", class_="shapes"
    )


def mark(  # noqa: PLR0913 - a mark is all of them
    shape: str,
    x: float,
    y: float,
    shade: str,
    tip: Sequence[str] = (),
    *,
    filled: bool = True,
    quiet: bool = False,
) -> Html:
    """Return a mark, with lines that say what it is; a quiet one is seen when it is asked."""
    kind = "mark" + " hollow" * (not filled) + " quiet" * quiet + f" {colour(shade)}"
    lines = [text(line) for line in tip if line]
    said = element("title", joined(lines, "\n")) if lines else EMPTY
    number = list(SHAPES).index(shape)
    return element("use", said, href=f"#m{number}", x=x, y=y, class_=kind)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    """Return a straight line of a class."""
    return element("path", d=f"M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}", class_=kind)


def path(points: Sequence[tuple[float, float]], kind: str, *, closed: bool = False) -> Html:
    """Return a line through points."""
    steps = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
    return element("path", d=f"M{steps}{'z' if closed else ''}", class_=kind) if points else EMPTY


def label(words: str, x: float, y: float, kind: str = "", **more: Value) -> Html:
    """Return words in a figure."""
    return element("text", text(words), x=x, y=y, class_=kind or None, **more)


def axis_left(scale: Scale, left: float, right: float, show: Callable[[float], str]) -> Html:
    """Return numbers at the left and faint lines through the panel."""
    parts = []
    for tick in scale.ticks:
        y = scale.at(tick)
        parts += [line(left, y, right, y, "zero" if tick == 0 else "grid")]
        parts += [label(show(tick), left - 7, y + 4, "end")]
    return joined(parts)


def axis_below(scale: Scale, y: float, show: Callable[[float], str], name: str = "") -> Html:
    """Return a line with numbers beneath it, and what they are."""
    parts = [line(scale.begin, y, scale.end, y, "axis")]
    for tick in scale.ticks:
        parts += [line(scale.at(tick), y, scale.at(tick), y + 4, "axis")]
        parts += [label(show(tick), scale.at(tick), y + 17, "middle")]
    parts += [label(name, (scale.begin + scale.end) / 2, y + 34, "middle")] if name else []
    return joined(parts)


def figure(
    name: str, title: str, description: str, drawing: Html, height: float, *beside: Html
) -> Html:
    """Return a drawing with its title, what stands above it, and a place for the keyboard."""
    svg = element(
        "svg", drawing, viewBox=f"0 0 {WIDTH} {_n(height)}", role="img", aria_label=description
    )
    plot = element(
        "div", svg, class_="plot", tabindex=0, role="group", aria_label=f"Figure: {description}"
    )
    return element(
        "figure",
        element("figcaption", text(title)),
        *beside,
        plot,
        class_="chart",
        id=f"figure-{name}",
    )


def swatch(shade: str, shape: str, words: str, line_: Line | None = None, **more: Value) -> Html:
    """Return an entry of a legend: a mark, with its line where it has one, and words."""
    filled = bool(more.pop("filled", 1))
    parts = [] if line_ is None else [line(0, 8, 30, 8, f"line {stroke(shade, line_)}")]
    drawn = element(
        "svg", *parts, mark(shape, 15, 8, shade, filled=filled),
        viewBox="0 0 30 16", width=30, height=16, aria_hidden="true",
    )  # fmt: skip
    return element("li", element("span", drawn, text(words), class_="key", **more))


def legend(entries: Sequence[Html]) -> Html:
    """Return a legend."""
    return element("ul", *entries, class_="legend")


def note(words: str) -> Html:
    """Return what stands above a drawing in small letters."""
    return element("p", text(words), class_="note")


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
