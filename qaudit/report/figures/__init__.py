"""The figures of an audit, each drawn once: one module per figure, rendered by `svg` and `png`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from qaudit.diagnostics.registry import parts
from qaudit.errors import not_written
from qaudit.report.figures.drawing import Drawing
from qaudit.report.figures.png import png
from qaudit.report.figures.quantized import quantized
from qaudit.report.figures.soups import soups
from qaudit.report.figures.spots import pareto
from qaudit.report.figures.svg import document
from qaudit.report.figures.trajectory import accuracy, trajectory
from qaudit.report.series import pictures
from qaudit.report.views import View
from qaudit.types import AuditRecord
from qaudit.whole import write_whole

__all__ = ["Drawing", "figures", "svg_files", "write"]

DRAWERS: dict[str, Callable[[View, str], Drawing]] = {
    "trajectory": trajectory,
    "accuracy": accuracy,
    "quantized": quantized,
    "soups": soups,
    "pareto": pareto,
}


def figures(audit: AuditRecord) -> tuple[Drawing, ...]:
    """Draw every figure for which the audit has the numbers."""
    view = View(audit)
    drawers = DRAWERS | {part.NAME: part.draw for part in parts("figure")}
    return tuple(drawers[name](view, alt) for name, alt in pictures(view))


def svg_files(drawings: Iterable[Drawing]) -> dict[str, str]:
    return {
        f"{drawing.name}{'-dark' * dark}.svg": document(drawing, dark=dark)
        for drawing in drawings
        for dark in (False, True)
    }


def write(audit: AuditRecord, folder: Path) -> tuple[Path, ...]:
    """Write every figure as `NAME.svg`, `NAME-dark.svg` and `NAME.png`."""
    drawings = figures(audit)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_written(folder, error) from error
    files = svg_files(drawings)
    for name, svg in files.items():
        write_whole(folder / name, svg)
    for drawing in drawings:  # last: these need matplotlib
        write_whole(folder / f"{drawing.name}.png", png(drawing))
    return tuple(folder / name for name in (*files, *(f"{d.name}.png" for d in drawings)))
