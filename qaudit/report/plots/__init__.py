"""The pictures of an audit, as SVG and PNG. The only room that knows matplotlib.

One file draws one picture; figures are made without pyplot: no global state, no display.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from qaudit.report.plots.curvature import curvature
from qaudit.report.plots.pareto import pareto
from qaudit.report.plots.plane import plane
from qaudit.report.plots.quantized import quantized
from qaudit.report.plots.soups import soups
from qaudit.report.plots.style import GROUND, settings
from qaudit.report.plots.trajectory import trajectory
from qaudit.report.series import pictures
from qaudit.report.views import View
from qaudit.types import Audit

DRAWERS = {
    "trajectory": trajectory,
    "quantized": quantized,
    "soups": soups,
    "pareto": pareto,
    "curvature": curvature,
    "plane": plane,
}


def draw(audit: Audit, folder: Path) -> tuple[Path, ...]:
    """Draw every picture that the audit has into a folder."""
    view = View(audit)
    written: list[Path] = []
    with mpl.rc_context(settings()), warnings.catch_warnings():
        # A letter that no font here has is drawn as a box; the name stands in the card.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        for name, _ in pictures(view):
            figure = DRAWERS[name](view)
            written += [_save(figure, folder / f"{name}.{kind}") for kind in ("svg", "png")]
    return tuple(written)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    date = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, dpi=160, facecolor=GROUND, metadata=date)
    return path
