"""Quantized against full-precision loss, a panel for each scheme: low and left is good."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qaudit.report.format import printable
from qaudit.report.plots.style import FAINT, INK, METHOD_COLOURS, new_figure
from qaudit.report.series import REACH, alike, contenders, stages_of
from qaudit.report.views import View
from qaudit.types import Subject


def quantized(view: View) -> Figure:
    """Draw, for each scheme, quantized against full-precision loss: low and left is good."""
    columns = min(4, len(view.schemes))
    rows = -(-len(view.schemes) // columns)
    figure = new_figure(max(5.5, 2.3 * columns), 2.3 * rows + 0.9)
    figure.set_layout_engine("constrained")
    shown = contenders(view)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=alike(view, shown))
    for k, axes in enumerate(grid.flat):
        if k < len(view.schemes):
            _panel(axes, view, view.schemes[k], shown)
        else:
            axes.set_visible(False)
    left_out = len(view.subjects) - len(shown)
    note = f"\n({left_out} of {len(view.subjects)} left out: over {100 * (REACH - 1):.0f} % "
    note += "more loss than the best)"
    title = "Quantized loss against full-precision loss, nats per token"
    figure.suptitle(title + (note if left_out else ""), fontsize=10)
    for column in range(columns):
        lowest = grid[(len(view.schemes) - 1 - column) // columns][column]
        lowest.set_xlabel("full-precision loss")
        lowest.tick_params(labelbottom=True)
    figure.supylabel("quantized loss", fontsize=9)
    figure.legend(
        handles=_legend(view), loc="outside lower center", ncols=5, frameon=False, fontsize=8.5
    )
    return figure


def _legend(view: View) -> list[Line2D]:
    """Explain colours, star, ring and line."""
    named = [stage for stage in stages_of(view) if stage is not None]
    handles = [
        Line2D([], [], marker="o", ls="", color=METHOD_COLOURS[k % len(METHOD_COLOURS)], label=s)
        for k, s in enumerate(map(printable, named))
    ]
    if view.soups:
        handles.append(Line2D([], [], marker="*", ms=9, ls="", color=INK, label="soup"))
    ring = Line2D([], [], marker="o", ms=11, ls="", mfc="none", mec=INK, label="lowest loss")
    line = Line2D([], [], ls="--", lw=0.9, color=FAINT, label="no cost")
    return [*handles, ring, line]


def _panel(axes: Axes, view: View, scheme: str, shown: tuple[Subject, ...]) -> None:
    best = view.best(scheme, tuple(s.label for s in view.subjects))
    stages = stages_of(view)
    span: list[float] = []
    for subject in shown:
        full, found = view.score(subject.label), view.score(subject.label, scheme)
        if full is None or found is None or found.relative_error is None:
            continue
        x, y = full.ce.estimate, found.ce.estimate
        span.append(x)
        soup = subject.kind == "soup"
        shade = (
            INK if soup else METHOD_COLOURS[stages.index(subject.first.stage) % len(METHOD_COLOURS)]
        )
        axes.plot(x, y, "*" if soup else "o", ms=9 if soup else 4.5, color=shade)
        if subject.label == best:
            axes.plot(x, y, "o", ms=13, mfc="none", mec=INK, mew=1)
    if span:
        axes.axline((min(span), min(span)), slope=1, color=FAINT, lw=0.9, ls="--", zorder=0)
    axes.set_title(printable(scheme), fontsize=9, loc="left")
    axes.grid(color=FAINT, alpha=0.25, lw=0.6)
    axes.margins(0.14)
