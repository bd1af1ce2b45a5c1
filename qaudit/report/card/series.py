"""Error along the series: the pictures, or lines of text where there are none."""

from __future__ import annotations

from qaudit.report import sentences
from qaudit.report.document import Block, Code, Figure, paragraph
from qaudit.report.series import pictures
from qaudit.report.sparkline import sparklines
from qaudit.report.views import View


def series_section(view: View) -> tuple[Block, ...]:
    """Say how the error moved, and show it."""
    moved = sentences.trajectory(view)
    lines = tuple(sparklines(view))
    drawn = (*picture(view, "trajectory", lines), *picture(view, "quantized"))
    bare: list[Block] = [] if drawn or not lines else [Code("\n".join(lines))]
    return (*([paragraph(moved)] if moved else []), *drawn, *bare)


def picture(view: View, name: str, lines: tuple[str, ...] = ()) -> tuple[Block, ...]:
    """Return a figure, if it can be drawn."""
    alt = dict(pictures(view)).get(name)
    return () if alt is None else (Figure(name, alt, lines=lines),)
