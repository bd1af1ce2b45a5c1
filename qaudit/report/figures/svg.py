"""Drawings as SVG: inside the page, where its style colours them, or as files of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from qaudit.report.elements import EMPTY, Html, element, joined, text
from qaudit.report.figures.drawing import (
    WIDTH,
    Box,
    Drawing,
    Label,
    Mark,
    Part,
    Path,
    Series,
    Swatch,
    leaves,
    line,
)
from qaudit.report.figures.style import DARK, LIGHT, resolved
from qaudit.report.format import pixels_of, wrapped

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
    "ring": "M-9 0a9 9 0 1 0 18 0a9 9 0 1 0-18 0z",
}
MARGIN, LINE = 14.0, 20.0
WHOLE_WIDTH = WIDTH + 2 * MARGIN  # of a file


def definitions() -> Html:
    return element("svg", _shapes(), width=0, height=0, aria_hidden="true", class_="shapes")


def figure(drawing: Drawing) -> Html:
    """Return a figure of the page: caption, note, legend, and a drawing that takes the focus."""
    svg = element(
        "svg",
        *map(_part, drawing.parts),
        viewBox=f"0 0 {WIDTH} {_n(drawing.height)}",
        role="img",
        aria_label=drawing.alt,
    )
    plot = element(
        "div", svg, class_="plot", tabindex=0, role="group", aria_label=f"Figure: {drawing.alt}"
    )
    caption = element("figcaption", text(drawing.title))
    note = element("p", text(drawing.note), class_="note") if drawing.note else EMPTY
    entries = [element("li", _key(swatch)) for swatch in drawing.legend]
    legend = element("ul", *entries, class_="legend") if entries else EMPTY
    name = f"figure-{drawing.name}"
    return element("figure", caption, note, legend, plot, class_="chart", id=name)


def _key(swatch: Swatch) -> Html:
    drawn = element(
        "svg", *map(_part, _swatch(swatch, 0, 8)),
        viewBox="0 0 30 16", width=30, height=16, aria_hidden="true",
    )  # fmt: skip
    return element("span", drawn, text(swatch.text), class_="key", data_series=swatch.series)


def document(drawing: Drawing, *, dark: bool = False) -> str:
    palette = DARK if dark else LIGHT
    parts, height = whole(drawing)
    kinds = sorted({("text " if isinstance(p, Label) else "") + p.kind for p in leaves(parts)})
    rules = [
        f"{_selector(kind)}{{{';'.join(f'{key}:{value}' for key, value in rule.items())}}}"
        for kind in sorted(kinds, key=lambda kind: (len(kind.split()), kind))
        if (rule := resolved(kind, palette))
    ]
    svg = element(
        "svg",
        element("title", text(drawing.alt)),
        element("style", Html("\n".join(rules))),
        _shapes({p.shape for p in leaves(parts) if isinstance(p, Mark)}),
        joined(map(_part, parts), "\n"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_n(WHOLE_WIDTH)} {_n(height)}",
        width=round(WHOLE_WIDTH),
        height=round(height),
        role="img",
    )
    return f"{svg}\n"


def whole(drawing: Drawing) -> tuple[tuple[Part, ...], float]:
    """Return a drawing with ground, title, note and legend above it, and the height of it all."""
    y = MARGIN + 12
    above: list[Part] = [Label(drawing.title, MARGIN, y, "title")]
    for words in wrapped(drawing.note, 125).splitlines():
        y += LINE
        above.append(Label(words, MARGIN, y, "faint"))
    x, y = MARGIN, y + (LINE if drawing.legend else 0)
    for swatch in drawing.legend:
        wide = pixels_of(swatch.text) + 36
        if x > MARGIN and x + wide > WHOLE_WIDTH - MARGIN:
            x, y = MARGIN, y + LINE
        above += _swatch(swatch, x, y - 4)
        above.append(Label(swatch.text, x + 36, y))
        x += wide + 14
    y += LINE
    height = y + drawing.height
    below = (_moved(part, y) for part in drawing.parts)
    return (Box(0, 0, WHOLE_WIDTH, height, "ground"), *above, *below), height


def _moved(part: Part, down: float) -> Part:
    match part:
        case Series():
            return replace(part, parts=tuple(_moved(p, down) for p in part.parts))
        case Path():
            return replace(part, points=tuple((x + MARGIN, y + down) for x, y in part.points))
        case _:
            return replace(part, x=part.x + MARGIN, y=part.y + down)


def _swatch(swatch: Swatch, x: float, y: float) -> Iterator[Part]:
    if swatch.line:
        yield line(x, y, x + 30, y, swatch.line)
    if swatch.mark:
        yield Mark(swatch.mark, x + 15, y, swatch.kind)


def _part(part: Part) -> Html:
    match part:
        case Series():
            return element("g", *map(_part, part.parts), class_="series", data_series=part.key)
        case Path():
            steps = "L".join(f"{_n(x)} {_n(y)}" for x, y in part.points)
            end = "z" if part.closed else ""
            return element("path", d=f"M{steps}{end}", class_=part.kind) if steps else EMPTY
        case Mark():
            tip = joined(map(text, part.tip), "\n")
            title = element("title", tip) if tip else EMPTY
            number = list(SHAPES).index(part.shape)
            return element("use", title, href=f"#m{number}", x=part.x, y=part.y, class_=part.kind)
        case Label():
            return element("text", text(part.text), x=part.x, y=part.y, class_=part.kind or None)
        case Box():
            return element(
                "rect", x=part.x, y=part.y, width=part.width, height=part.height,
                class_=part.kind, fill_opacity=part.strength,
            )  # fmt: skip


def _shapes(used: Iterable[str] = SHAPES) -> Html:
    shown = set(used)
    shapes = (
        element("path", id=f"m{k}", d=d)
        for k, (shape, d) in enumerate(SHAPES.items())
        if shape in shown
    )
    return element("defs", *shapes)


def _selector(kind: str) -> str:
    return "".join("text" if name == "text" else f".{name}" for name in kind.split())


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
