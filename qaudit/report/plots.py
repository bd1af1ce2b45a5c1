"""The pictures of an audit, as SVG and PNG. The only module that knows matplotlib.

A picture stands on its own opaque light ground, so that it reads the same on a light and on a
dark page. Colours are Okabe and Ito's, darkened until text in them can be read, and stay apart
for people with any common colour vision; colour says the method, line and marker which of its
schemes, and every line is named at its end. Figures
are made without pyplot: no global state, no display.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from qaudit.report.format import count, printable
from qaudit.report.series import (
    REACH,
    Axis,
    alike,
    axis,
    contenders,
    error_of,
    knows_rates,
    pictures,
    soup_position,
    spread_out,
    stages_of,
    trunk,
)
from qaudit.report.views import View
from qaudit.types import Audit, Interval, Subject

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


def draw(audit: Audit, folder: Path) -> tuple[Path, ...]:
    """Draw every picture that the audit has into a folder."""
    view, drawers = View(audit), {"trajectory": trajectory, "quantized": quantized}
    written: list[Path] = []
    with mpl.rc_context(STYLE):
        for name, _ in pictures(view):
            figure = drawers[name](view)
            written += [_save(figure, folder / f"{name}.{kind}") for kind in ("svg", "png")]
    return tuple(written)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    date = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(
        path, dpi=160, facecolor=GROUND, bbox_inches="tight", pad_inches=0.15, metadata=date
    )
    return path


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), facecolor=GROUND)
    FigureCanvasAgg(figure)
    return figure


def _styles(schemes: tuple[str, ...]) -> dict[str, tuple[str, str, str]]:
    """Give each scheme its method's colour and, within the method, its own line and marker."""
    methods: dict[str, list[str]] = {}
    for scheme in schemes:
        methods.setdefault(scheme.partition("-")[0], []).append(scheme)
    return {
        scheme: (METHOD_COLOURS[k % len(METHOD_COLOURS)], *VARIANTS[n % len(VARIANTS)])
        for k, members in enumerate(methods.values())
        for n, scheme in enumerate(members)
    }


# --------------------------------------------------------------------- along the series


def trajectory(view: View) -> Figure:
    """Draw relative error along the series, with the learning rate beneath where it is known."""
    where, rates = axis(view), knows_rates(view)
    figure = _figure(8.5, 5.6 if rates else 4.6)
    if rates:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4.2, 1), squeeze=True)
        figure.subplots_adjust(hspace=0.12)
    else:
        above = below = figure.subplots()
    ends = {scheme: _line(above, view, where, scheme) for scheme in view.schemes}
    _scale(above, view)
    _marks(above, where)
    _name_stages(above, view, where)
    _name_ends(above, view, {s: y for s, y in ends.items() if y is not None})
    above.set_ylabel("relative error of the loss, %")
    above.set_title("What quantization adds to the loss, along the series", loc="left", pad=38)
    above.annotate(
        _key(view), (0, 1), (0, 26), xycoords="axes fraction", textcoords="offset points",
        color=FAINT, fontsize=8,
    )  # fmt: skip
    if rates:
        _learning_rate(below, view, where)
        _marks(below, where)
    below.set_xlabel(where.name)
    below.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(round(x))))
    return figure


def _line(axes: Axes, view: View, where: Axis, scheme: str) -> float | None:
    """Draw one scheme and return the height at which its line ends."""
    colour, line, marker = _styles(view.schemes)[scheme]
    main = [(where.positions[s.label], e) for s in trunk(view) if (e := error_of(view, s, scheme))]
    if main:
        x = [position for position, _ in main]
        axes.plot(
            x, [100 * e.estimate for _, e in main], line, marker=marker, ms=4, lw=1.5, color=colour
        )
        low, high = [_bound(e.low) for _, e in main], [_bound(e.high) for _, e in main]
        axes.fill_between(x, low, high, color=colour, alpha=0.16, lw=0)
    for subject in view.checkpoints:
        if subject not in trunk(view) and (error := error_of(view, subject, scheme)):
            _point(axes, where.positions[subject.label], error, marker, colour)
    last = main[-1][1].estimate * 100 if main else None
    for k, subject in enumerate(view.soups):
        if error := error_of(view, subject, scheme):
            _point(axes, soup_position(where, k), error, "*", colour)
            last = 100 * error.estimate
    return last


def _point(axes: Axes, x: float, error: Interval, marker: str, colour: str) -> None:
    """Draw one error with its interval: a filled star for a soup, a hollow mark for the others."""
    star = marker == "*"
    axes.plot([x, x], [_bound(error.low), _bound(error.high)], "-", lw=1, color=colour, alpha=0.6)
    axes.plot(
        [x], [100 * error.estimate], marker, color=colour, mew=1,
        ms=10 if star else 4, mfc=colour if star else GROUND,
    )  # fmt: skip


def _bound(value: float) -> float:
    """Return a bound in percent; one that is infinite is not drawn."""
    return 100 * value if math.isfinite(value) else math.nan


def _scale(axes: Axes, view: View) -> None:
    """Take a logarithmic scale where errors are positive and lie far apart."""
    errors = [
        100 * e.estimate
        for subject in view.subjects
        for scheme in view.schemes
        if (e := error_of(view, subject, scheme))
    ]
    positive = [e for e in errors if e > 0]
    if not positive or max(positive) < 20 * min(positive):
        axes.axhline(0, color=FAINT, lw=0.8, zorder=0)
    elif len(positive) == len(errors):
        axes.set_yscale("log")
        axes.set_ylim(min(positive) / 1.8, max(positive) * 1.8)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_yscale("symlog", linthresh=max(1e-3, sorted(map(abs, errors))[len(errors) // 4]))
        axes.axhline(0, color=FAINT, lw=0.8, zorder=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(axis="y", color=FAINT, alpha=0.25, lw=0.6)


def _key(view: View) -> str:
    """Say what the marks mean, as far as they occur."""
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    said = [f"bands: {level} intervals over {view.unit}s"]
    if len(trunk(view)) < len(view.checkpoints):
        said.append("hollow: other ingredients")
    if view.soups:
        said.append("star: soup" if len(view.soups) == 1 else "stars: soups")
    return "; ".join(said)


def _marks(axes: Axes, where: Axis) -> None:
    """Mark where stages end."""
    for end in sorted(where.stage_ends.values())[:-1]:
        axes.axvline(end, color=FAINT, lw=0.9, ls=(0, (4, 3)), zorder=0)


def _name_stages(axes: Axes, view: View, where: Axis) -> None:
    """Write the stages' names above them, and the soup's above its star."""
    begin, names = min(where.positions.values()), []
    for stage, end in sorted(where.stage_ends.items(), key=lambda pair: pair[1]):
        if len(where.stage_ends) > 1:
            names.append((stage, (begin + end) / 2))
        begin = end
    if len(view.soups) == 1:
        names.append((view.soups[0].label[:14], soup_position(where, 0)))
    for name, x in names:
        axes.annotate(
            printable(name), (x, 1.015), xycoords=("data", "axes fraction"),
            ha="center", va="bottom", color=INK, fontsize=8.5,
        )  # fmt: skip


def _name_ends(axes: Axes, view: View, ends: dict[str, float]) -> None:
    """Write each scheme's name at the end of its line, pushed apart where they would overlap."""
    if not ends:
        return
    axes.figure.canvas.draw()
    heights = {s: axes.transAxes.inverted().transform(axes.transData.transform((0, y)))[1]
               for s, y in ends.items()}  # fmt: skip
    placed = spread_out(heights, gap=0.048)
    for scheme, height in placed.items():
        colour, _, _ = _styles(view.schemes)[scheme]
        axes.annotate(
            printable(scheme), (1.0, heights[scheme]), (1.035, height), xycoords="axes fraction",
            textcoords="axes fraction", va="center", color=colour, fontweight="bold",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.7, "alpha": 0.7},
        )  # fmt: skip


def _learning_rate(axes: Axes, view: View, where: Axis) -> None:
    points = [(where.positions[s.label], s.first.learning_rate or 0.0) for s in trunk(view)]
    axes.plot(*zip(*points, strict=True), "-", marker=".", color=INK, lw=1.2)
    peak = max(rate for _, rate in points)
    if peak > 0:
        axes.set_yticks([0, peak], ["0", f"{peak:.2g}"])
        axes.set_ylim(-0.12 * peak, 1.15 * peak)
    axes.set_ylabel("learning\nrate")
    axes.grid(axis="y", color=FAINT, alpha=0.25, lw=0.6)


# --------------------------------------------------------------------- loss against loss


def quantized(view: View) -> Figure:
    """Draw, for each scheme, quantized against full-precision loss: low and left is good."""
    columns = min(4, len(view.schemes))
    rows = -(-len(view.schemes) // columns)
    figure = _figure(max(5.5, 2.3 * columns), 2.3 * rows + 0.9)
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
