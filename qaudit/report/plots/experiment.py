"""An experiment over seeds: what every model loses, and every contrast held against zero.

Models stand in the order of the experiment's file, which is no order in time, so that no line
joins them. Contrasts in percentage points and in nats have a panel each.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qaudit.report.format import printable
from qaudit.report.plots.style import FAINT, GROUND, INK, METHOD_COLOURS, STYLE, new_figure
from qaudit.types import ContrastResult, ExperimentSummary

COLOURS = {"agrees": "#00906a", "disagrees": "#b02020", "inconclusive": FAINT, "open": "#004f9e"}

MEANINGS = {
    "agrees": "as expected",
    "disagrees": "against it",
    "inconclusive": "not settled",
    "open": "nothing expected",
}


def draw_experiment(summary: ExperimentSummary, path: Path) -> Path:
    """Draw a summary into one SVG file."""
    with mpl.rc_context(STYLE):
        figure = experiment(summary)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(
            path, facecolor=GROUND, bbox_inches="tight", pad_inches=0.15, metadata={"Date": None}
        )
    return path


def experiment(summary: ExperimentSummary) -> Figure:
    """Draw the errors of all models above, the contrasts in percentage points or nats below."""
    schemes = tuple(dict.fromkeys(point.scheme for point in summary.points))
    groups = [
        [r for r in summary.results if r.seeds and (r.contrast.measure == "error") is in_points]
        for in_points in (True, False)
    ]
    shown = [group for group in groups if group]
    heights = [2.6, *(0.9 + 0.24 * len(group) for group in shown)]
    figure = new_figure(8.0, sum(heights) + 0.5)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _errors(panels[0], summary, schemes)
    for axes, group in zip(panels[1:], shown, strict=True):
        _contrasts(axes, group)
    if shown:
        figure.legend(
            handles=_legend(shown), loc="outside lower center", ncols=6, frameon=False, fontsize=8
        )
    seeds = len(summary.seeds)
    figure.suptitle(
        printable(f"{summary.experiment}, size {summary.size}, {seeds} seed") + "s" * (seeds != 1),
        fontsize=10,
    )
    return figure


def _legend(shown: list[list[ContrastResult]]) -> list[Line2D]:
    """Explain dots, bars and colours, as far as they are there."""
    there = {result.standing for group in shown for result in group}
    bars = [
        Line2D([], [], lw=3, color=colour, alpha=0.45, label=f"over seeds: {MEANINGS[standing]}")
        for standing, colour in COLOURS.items()
        if standing in there and any(r.interval for group in shown for r in group)
    ]
    return [Line2D([], [], marker="o", ls="", ms=3.2, color=INK, label="a seed"), *bars]


def _errors(axes: Axes, summary: ExperimentSummary, schemes: tuple[str, ...]) -> None:
    """Draw each model's relative error: a dot for a seed, a bar at their mean."""
    for k, scheme in enumerate(schemes):
        colour = METHOD_COLOURS[k % len(METHOD_COLOURS)]
        shift = 0.13 * (k - (len(schemes) - 1) / 2)
        for x, subject in enumerate(summary.subjects):
            found = [p for p in summary.points if (p.subject, p.scheme) == (subject, scheme)]
            errors = [100 * p.interval.estimate for p in found]
            if errors:
                mean = sum(errors) / len(errors)
                axes.plot([x + shift] * len(errors), errors, "o", ms=3, color=colour, alpha=0.7)
                axes.plot(x + shift, mean, "_", ms=9, mew=1.8, color=colour)
    names = [printable(subject) for subject in summary.subjects]
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    axes.set_ylabel("relative error, %")
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    handles = [
        Line2D([], [], marker="o", ls="", ms=4, color=METHOD_COLOURS[k % len(METHOD_COLOURS)])
        for k in range(len(schemes))
    ]
    labels = [printable(scheme) for scheme in schemes]
    axes.legend(
        handles,
        labels,
        frameon=False,
        fontsize=8,
        ncols=min(5, max(1, len(schemes))),
        loc="lower left",
        bbox_to_anchor=(0, 1),
    )


def _contrasts(axes: Axes, results: list[ContrastResult]) -> None:
    """Draw each contrast: a dot a seed, a bar over seeds, green where it goes as expected."""
    scale = 100 if results[0].contrast.measure == "error" else 1
    axes.axvline(0, color=FAINT, lw=0.8, ls="--")
    for y, result in enumerate(results):
        colour = COLOURS.get(result.standing, INK)
        if result.interval is not None:
            low, high = scale * result.interval.low, scale * result.interval.high
            axes.plot([low, high], [y, y], lw=3, color=colour, alpha=0.45, solid_capstyle="butt")
            axes.plot(scale * result.interval.estimate, y, "|", ms=11, mew=2, color=colour)
        values = [scale * one.interval.estimate for one in result.seeds]
        axes.plot(values, [y] * len(values), "o", ms=3.2, color=INK)
    names = [printable(f"{r.contrast.a} - {r.contrast.b}, {r.contrast.scheme}") for r in results]
    axes.set_yticks(range(len(results)), names, fontsize=7.5)
    axes.invert_yaxis()
    unit = (
        "difference of relative errors, % points" if scale == 100 else "difference, nats per token"
    )
    axes.set_xlabel(unit, fontsize=8.5)
