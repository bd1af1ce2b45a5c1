"""The figures of the page: SVG made here, with the same marks as in the pictures.

Each file draws one figure. Every mark carries what it means as a `title`, which browsers show by
themselves; the script turns it into a tooltip that the keyboard reaches, too. Colours are classes
of the page's style, so that figures follow its light and dark.
"""

from __future__ import annotations

from collections.abc import Callable

from qaudit.report.elements import Html
from qaudit.report.html.figures.curvature import curvature
from qaudit.report.html.figures.pareto import pareto
from qaudit.report.html.figures.plane import plane
from qaudit.report.html.figures.quantized import quantized
from qaudit.report.html.figures.soups import soups
from qaudit.report.html.figures.trajectory import trajectory
from qaudit.report.series import pictures
from qaudit.report.views import View

DRAWERS: dict[str, Callable[[View, str], Html]] = {
    "trajectory": trajectory,
    "quantized": quantized,
    "soups": soups,
    "pareto": pareto,
    "curvature": curvature,
    "plane": plane,
}


def figures(view: View) -> dict[str, Html]:
    """Return every figure that the audit has and the page draws, by the name of its picture."""
    return {
        name: DRAWERS[name](view, description)
        for name, description in pictures(view)
        if name in DRAWERS
    }
