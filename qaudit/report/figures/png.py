"""Drawings as PNG, for viewers that show no SVG: the only module that needs matplotlib."""

from __future__ import annotations

import importlib
import os
import warnings
from io import BytesIO
from typing import Any

from qaudit.errors import MachineError
from qaudit.report.figures.drawing import Box, Drawing, Label, Leaf, Mark, Path, leaves
from qaudit.report.figures.style import LIGHT, resolved
from qaudit.report.figures.svg import WHOLE_WIDTH, whole

DOTS, SCALE = 100, 1.6
POINT = 72 / DOTS  # of a pixel
FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Hiragino Sans", "PingFang SC", "Yu Gothic")
"""Fonts for scripts that the usual one lacks, each used where it is installed."""


def png(drawing: Drawing) -> bytes:
    """Render the light variant."""
    figure = canvas(drawing)
    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="png", dpi=DOTS * SCALE, metadata={"Software": None})
    return buffer.getvalue()


def canvas(drawing: Drawing) -> Any:
    """Return a matplotlib figure that holds a drawing, one unit of its axes a pixel."""
    _import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import get_font_names

    parts, height = whole(drawing)
    figure = Figure(figsize=(WHOLE_WIDTH / DOTS, height / DOTS), dpi=DOTS)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WHOLE_WIDTH), ylim=(height, 0))
    axes.axis("off")
    family = ["DejaVu Sans", *set(FONTS).intersection(get_font_names())]
    for k, part in enumerate(leaves(parts)):
        _draw(axes, part, family, k)
    return figure


def _import_matplotlib() -> None:
    """Import matplotlib without MPLBACKEND: a backend that is not installed fails the import."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise MachineError(
            f"PNG pictures need matplotlib, which cannot be imported: {error}",
            hint="pip install qaudit-llm",
        ) from error
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def _draw(axes: Any, part: Leaf, family: list[str], order: int) -> None:
    from matplotlib.patches import Polygon, Rectangle

    rule = resolved(f"text {part.kind}" if isinstance(part, Label) else part.kind, LIGHT)
    width = float(rule.get("stroke-width", "1").removesuffix("px")) * POINT
    opacity = float(rule.get("opacity", "1"))
    both: dict[str, Any] = {"zorder": order, "alpha": opacity}
    match part:
        case Path(points=()):
            return
        case Path(closed=True):
            axes.add_patch(Polygon(part.points, facecolor=rule["fill"], linewidth=0, **both))
        case Path():
            dashes = [float(x) / (width / POINT) for x in rule.get("stroke-dasharray", "").split()]
            style: Any = (0, dashes) if dashes else "-"
            x, y = zip(*part.points, strict=True)
            axes.plot(x, y, color=rule["stroke"], lw=width, ls=style, **both)
        case Box():
            both["alpha"] = part.strength or opacity
            size = (part.x, part.y), part.width, part.height
            axes.add_patch(Rectangle(*size, facecolor=rule["fill"], linewidth=0, **both))
        case Mark() if opacity > 0:
            big = {"*": 13.0, "ring": 18.0}.get(part.shape, 8.0) * POINT
            axes.plot(
                [part.x], [part.y], "o" if part.shape == "ring" else part.shape, ms=big, mew=width,
                color=rule["stroke"], mfc=rule["fill"], **both,
            )  # fmt: skip
        case Label():
            _write(axes, part, rule, family, order)


def _write(axes: Any, part: Label, rule: dict[str, str], family: list[str], order: int) -> None:
    from matplotlib.patheffects import withStroke

    halo = withStroke(linewidth=6 * POINT, foreground=rule["stroke"])
    axes.text(
        part.x, part.y, part.text, color=rule["fill"], family=family, zorder=order,
        ha={"end": "right", "middle": "center"}.get(rule.get("text-anchor", ""), "left"),
        va="baseline", fontsize=float(rule.get("font-size", "12px").removesuffix("px")) * POINT,
        weight="bold" if "font-weight" in rule else "normal", parse_math=False,
        path_effects=[] if rule["stroke"] == "none" else [halo],
    )  # fmt: skip
