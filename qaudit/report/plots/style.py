"""How every picture looks: ground, fonts, sizes. What marks mean is in `report/looks.py`.

A picture stands on its own opaque light ground, so that it reads the same on a light and on a
dark page.

Every text lies inside the picture, whose size is fixed beforehand: names are cut in their middle,
and what stands around the axes makes them smaller.
"""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from qaudit.report.looks import (
    FAINT,
    GROUND,
    INK,
    METHOD_COLOURS,
    bound,
    drawable,
    name,
    styles,
)

__all__ = [
    "FAINT",
    "GROUND",
    "INK",
    "METHOD_COLOURS",
    "STYLE",
    "bound",
    "drawable",
    "name",
    "new_figure",
    "settings",
    "styles",
]

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
