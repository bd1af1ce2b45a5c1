"""Soup minus ingredient under each scheme, with intervals: left of the line favours the soup.

Beside each other the two questions that can have opposite answers: which of the quantized models
is better, and which of them lost less on the way. Of several soups the first in order is drawn,
the pick if it is one.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qaudit.report.format import plural
from qaudit.report.looks import VERDICT_LOOKS
from qaudit.report.plots.style import FAINT, INK, drawable, name, new_figure
from qaudit.report.soups import WORDS, Row, drawn
from qaudit.report.views import View
from qaudit.types import Comparison


def soups(view: View) -> Figure:
    """Draw both differences of the first soup to its ingredients, a row for each scheme."""
    soup, opponents, shown = drawn(view)
    schemes = list(dict.fromkeys(row.scheme for row in shown))
    members = max(sum(row.scheme == scheme for row in shown) for scheme in schemes)
    figure = new_figure(8.5, 1.9 + len(schemes) * (0.26 + 0.09 * members))
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, which in ((left, "outright"), (right, "difference")):
        for row in shown:
            comparison: Comparison = getattr(row, which)
            _point(axes, comparison, _height(row, schemes, shown), best=row.is_best)
        axes.axvline(0, color=INK, lw=0.9, zorder=0)
        axes.grid(axis="x", color=FAINT, alpha=0.25, lw=0.6)
        axes.set_xlabel("nats per token, soup minus ingredient")
        axes.locator_params(axis="x", nbins=5)
        for k in range(1, len(schemes)):
            axes.axhline(k - 0.5, color=FAINT, alpha=0.25, lw=0.6)
    left.set_yticks(range(len(schemes)), [name(scheme) for scheme in schemes])
    left.set_ylim(len(schemes) - 0.5, -0.5)
    left.set_title("Loss of the quantized models", loc="left", fontsize=9)
    right.set_title("What quantization took", loc="left", fontsize=9)
    _titles(figure, view, soup.label, opponents, rows=shown)
    return figure


def _height(row: Row, schemes: list[str], shown: list[Row]) -> float:
    """Place the ingredients of a scheme beneath each other, in one order everywhere."""
    members = [other.opponent for other in shown if other.scheme == row.scheme]
    step = 0.7 / max(1, len(members))
    return schemes.index(row.scheme) + step * (members.index(row.opponent) - (len(members) - 1) / 2)


def _point(axes: Axes, found: Comparison, y: float, *, best: bool) -> None:
    colour, marker, filled = VERDICT_LOOKS[found.verdict]
    low, middle, high = (
        drawable(x) for x in (found.interval.low, found.interval.estimate, found.interval.high)
    )
    axes.plot([low, high], [y, y], "-", color=colour, lw=1.8 if best else 0.8)
    axes.plot(
        [middle], [y], marker, color=colour, ms=6.5 if best else 3.5, mew=1.1,
        mfc=colour if filled else "white",
    )  # fmt: skip


def _titles(figure: Figure, view: View, label: str, members: int, rows: list[Row]) -> None:
    """Say which soup this is, what the marks mean, and who is left out."""
    others = len(view.soups) - 1
    title = f"{name(label, 40)} against its {plural(members, 'ingredient')}"
    title += f" (one of {others + 1} soups)" if others else ""
    figure.suptitle(title, fontsize=10.5)
    verdicts = {c.verdict for row in rows for c in (row.outright, row.difference)}
    handles = [
        Line2D([], [], color=colour, marker=marker, ms=5.5, lw=1.4,
               mfc=colour if filled else "white", label=WORDS[verdict])
        for verdict, (colour, marker, filled) in VERDICT_LOOKS.items()
        if verdict in verdicts
    ]  # fmt: skip
    level = f"{100 * view.audit.plan.recipe.confidence:g} % intervals"
    size = (
        "large: the best ingredient"
        if any(not row.is_best for row in rows)
        else ("against the best ingredient")
    )
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False,
        fontsize=8.5, title=f"{level}; {size}", title_fontsize=8.5,
    )  # fmt: skip
