"""How every picture looks: ground, colours, lines and markers.

A picture stands on its own opaque light ground, so that it reads the same on a light and on a
dark page. Colours are Okabe and Ito's, darkened until text in them can be read, and stay apart
for people with any common colour vision. No picture needs colour: the marker says the method,
too, and the line which of its schemes, so that a grey copy tells as much.

Every text lies inside the picture, whose size is fixed beforehand: names are cut in their middle,
and what stands around the axes makes them smaller.
"""

from __future__ import annotations

import math
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from qaudit.report.format import printable
from qaudit.report.width import shortened

Line = str | tuple[int, tuple[int, ...]]

GROUND, INK, FAINT = "#fbfbf8", "#222222", "#70706c"
METHOD_COLOURS = ("#004f9e", "#d05500", "#00906a", "#b0528c", "#202020")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")  # a star is a soup
LINES: tuple[Line, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
LONGEST_NAME = 24
SCRIPTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Hiragino Sans", "PingFang SC", "Yu Gothic")
"""Fonts with letters that the usual one has not, each used where it is installed."""

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "qaudit",  # the same audit gives the same bytes
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.size": 9,
    "axes.facecolor": GROUND,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def settings() -> dict[Any, Any]:
    """Return the style, with fonts for further scripts where this machine has them."""
    from matplotlib.font_manager import get_font_names

    there = set(get_font_names())
    return {**STYLE, "font.family": ["DejaVu Sans", *(f for f in SCRIPTS if f in there)]}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure with a canvas of its own, which makes room for what it holds."""
    room = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches around everything
    figure = Figure(figsize=(width, height), facecolor=GROUND, layout=room)
    FigureCanvasAgg(figure)
    return figure


def name(text: str, width: int = LONGEST_NAME) -> str:
    """Return a name as it is written into a picture."""
    return shortened(printable(text), width)


def styles(schemes: tuple[str, ...]) -> dict[str, tuple[str, Line, str]]:
    """Give each scheme its method's colour and marker, and within the method its own line.

    A method with more schemes than there are lines goes on with the markers of nobody else.
    """
    methods: dict[str, list[str]] = {}
    for scheme in schemes:
        methods.setdefault(scheme.partition("-")[0], []).append(scheme)
    found: dict[str, tuple[str, Line, str]] = {}
    for k, members in enumerate(methods.values()):
        for n, scheme in enumerate(members):
            marker = MARKERS[(k + n // len(LINES) * len(methods)) % len(MARKERS)]
            found[scheme] = (METHOD_COLOURS[k % len(METHOD_COLOURS)], LINES[n % len(LINES)], marker)
    return found


def bound(value: float) -> float:
    """Return a bound in percent; one that is infinite is not drawn."""
    return 100 * drawable(value)


def drawable(value: float) -> float:
    """Return a number; one that is infinite is not drawn."""
    return value if math.isfinite(value) else math.nan
