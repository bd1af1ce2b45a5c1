"""How every picture looks: ground, colours, lines and markers.

A picture stands on its own opaque light ground, so that it reads the same on a light and on a
dark page. Colours are Okabe and Ito's, darkened until text in them can be read, and stay apart
for people with any common colour vision; colour says the method, line and marker which of its
schemes.
"""

from __future__ import annotations

import math
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

GROUND, INK, FAINT = "#fbfbf8", "#222222", "#70706c"
METHOD_COLOURS = ("#004f9e", "#d05500", "#00906a", "#b0528c", "#202020")
VARIANTS = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
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


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure with a canvas of its own."""
    figure = Figure(figsize=(width, height), facecolor=GROUND)
    FigureCanvasAgg(figure)
    return figure


def styles(schemes: tuple[str, ...]) -> dict[str, tuple[str, str, str]]:
    """Give each scheme its method's colour and, within the method, its own line and marker."""
    methods: dict[str, list[str]] = {}
    for scheme in schemes:
        methods.setdefault(scheme.partition("-")[0], []).append(scheme)
    return {
        scheme: (METHOD_COLOURS[k % len(METHOD_COLOURS)], *VARIANTS[n % len(VARIANTS)])
        for k, members in enumerate(methods.values())
        for n, scheme in enumerate(members)
    }


def bound(value: float) -> float:
    """Return a bound in percent; one that is infinite is not drawn."""
    return 100 * value if math.isfinite(value) else math.nan
