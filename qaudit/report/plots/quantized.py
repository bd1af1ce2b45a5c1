"""Quantized against full-precision loss, a panel for each scheme: low and left is good."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qaudit.report.looks import stage_look
from qaudit.report.plots.style import FAINT, INK, name, new_figure
from qaudit.report.series import REACH, alike, contenders, stages_of
from qaudit.report.views import View
from qaudit.types import Subject

MANY = 60  # subjects, beyond which marks are smaller
LONGEST_STAGE, LEGEND_INCHES = 16, 1.7


def quantized(view: View) -> Figure:
    """Draw, for each scheme, quantized against full-precision loss: low and left is good."""
    columns = min(4, len(view.schemes))
    rows = -(-len(view.schemes) // columns)
    figure = new_figure(max(5.5, 2.3 * columns), 2.3 * rows + 0.9)
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
    handles = _legend(view)
    figure.legend(
        handles=handles, loc="outside lower center", frameon=False, fontsize=8.5,
        ncols=min(len(handles), int(figure.get_figwidth() / LEGEND_INCHES)),
    )  # fmt: skip
    return figure


def _legend(view: View) -> list[Line2D]:
    """Explain colours, star, ring and line."""
    named = [stage for stage in stages_of(view) if stage is not None]
    handles = [
        Line2D([], [], marker=marker, ls="", color=colour, label=name(stage, LONGEST_STAGE))
        for stage, (colour, marker) in zip(named, map(stage_look, range(len(named))), strict=True)
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
    small = 4.5 if len(shown) <= MANY else 3.0
    for subject in shown:
        full, found = view.score(subject.label), view.score(subject.label, scheme)
        if full is None or found is None or found.relative_error is None:
            continue
        x, y = full.ce.estimate, found.ce.estimate
        span.append(x)
        soup = subject.kind == "soup"
        colour, marker = (INK, "*") if soup else stage_look(stages.index(subject.first.stage))
        axes.plot(x, y, marker, ms=2 * small if soup else small, color=colour)
        if subject.label == best:
            axes.plot(x, y, "o", ms=13, mfc="none", mec=INK, mew=1)
    if span:
        axes.axline((min(span), min(span)), slope=1, color=FAINT, lw=0.9, ls="--", zorder=0)
    axes.set_title(name(scheme), fontsize=9, loc="left")
    axes.grid(color=FAINT, alpha=0.25, lw=0.6)
    axes.margins(0.14)
