"""The figures of an audit: the series, full precision against quantized, soups, fewer bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qaudit.report.chart import (
    COLOURS,
    FAINT,
    GROUND,
    INK,
    LINE,
    Chart,
    look_of,
    looks,
    name_of,
)
from qaudit.report.format import count, listing, loss, percent, plural, spread
from qaudit.report.series import MEANINGS, drawn_soup, soup_reading
from qaudit.report.verdict import points
from qaudit.report.views import View
from qaudit.types import Comparison, Interval, Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Errors = Callable[[str, str], Interval | None]
FAR = 20
"""Values whose largest is so many times the smallest get a logarithmic scale."""


# ------------------------------------------------------------------ along the series

MANY = 40  # marks of one line that are told apart


def trajectory(view: View) -> Chart:
    """Draw added losses, and the margins, each with the classes of bits that have it."""
    classes: dict[float, list[str]] = {}  # by margin, in percent
    for one in view.classes:
        if one.margin and one.unit == "fraction" and one.metric in (None, "relative_error"):
            classes.setdefault(100 * one.margin, []).append(one.bit_class)
    margins = {
        margin: f"margin at {listing(names)}{' bits' * names[-1].isdecimal()}: {margin:g}"
        for margin, names in classes.items()
    }
    title = "What quantization adds to the loss, along the series"
    return _along(view, view.error, (title, "added loss, %", view.unit), margins)


def accuracy(view: View) -> Chart:
    """Draw the drop of accuracy, of the mean over tasks or the only task."""
    drops = {row.cell: row.accuracy_drop for row in view.audit.tasks}
    title = "What quantization costs of accuracy on tasks, along the series"
    words = title, "accuracy lost, % of what full precision gets wrong", "item"
    return _along(view, lambda subject, scheme: drops.get((subject, scheme)), words, {})


def _along(
    view: View, error_of: Errors, words: tuple[str, str, str], margins: Mapping[float, str]
) -> Chart:
    """Draw errors; the words are a title, the name of the axis, and what intervals are over."""
    title, unit, sampled = words
    has_rates = view.axis.falls is not None
    tall = max(3.3, LINE * len(view.schemes))
    chart = Chart(title, _key(view, sampled), tall + (0.8 if has_rates else 0.0))
    panels = chart.panels(*((tall, 0.6) if has_rates else (tall,)), sharex=True)
    axes, places = panels[0], view.axis.places
    axes.set_ylabel(unit)
    errors = {
        (s.label, scheme): Interval(100 * e.estimate, 100 * e.low, 100 * e.high)
        for scheme in view.schemes
        for s in view.subjects
        if (e := error_of(s.label, scheme)) and math.isfinite(e.estimate)
    }
    hollow = [s for s in view.checkpoints if s not in view.axis.trunk]
    for k, (scheme, look) in enumerate(looks(view.schemes).items()):
        chart.names[str(k)] = scheme
        at = {
            s.label: (places[s.label], e, _tip(s, scheme, e))
            for s in view.subjects
            if (e := errors.get((s.label, scheme)))
        }
        look |= {"ms": 2} if len(view.axis.trunk) > MANY else {}
        for run in view.axis.runs:
            if known := [at[s.label] for s in run if s.label in at]:
                chart.curve(axes, str(k), known, **look)
        if known := [at[s.label] for s in hollow if s.label in at]:
            chart.whiskers(axes, str(k), known, filled=False, **look)
        if known := [at[s.label] for s in view.soups if s.label in at]:
            chart.whiskers(axes, str(k), known, **{**look, "marker": "*", "ms": 8})
    _error_scale(axes, [e.estimate for e in errors.values()], margins)
    ends = {  # where lines end, the highest first
        scheme: errors[s.label, scheme].estimate
        for s in (*view.axis.trunk, *view.soups)
        for scheme in view.schemes
        if (s.label, scheme) in errors
    }
    order = sorted(ends, key=ends.__getitem__, reverse=True)
    chart.legend({scheme: looks(view.schemes)[scheme] for scheme in order})
    if has_rates:
        _rates(view, panels[1])
    series_axis(view, panels)
    return chart


def _error_scale(axes: Axes, values: Sequence[float], margins: Mapping[float, str]) -> None:
    """Let errors far apart be on a logarithmic scale that is linear up to the least margin.

    So nothing below what a policy allows looks large. Margins replace the numbers beside them.
    """
    axes.axhline(0.0, color=FAINT, lw=0.7, zorder=2)
    for margin in margins:
        axes.axhline(margin, color=INK, ls=(0, (6, 4)), lw=0.7, zorder=2)
    positive = [v for v in values if v > 0]
    quarter = max(1e-3, sorted(map(abs, values))[len(values) // 4]) if values else 1.0
    straight = min(margins, default=float(f"{quarter:.0e}"))
    ticks = [0.0, *axes.get_yticks()]
    if positive and max(positive) >= FAR * min(positive) and max(positive) > 2 * straight:
        axes.set_yscale("symlog", linthresh=straight, linscale=0.8)
        axes.set_ylim(bottom=min(1.5 * min(values), -0.12 * straight))
        ticks = [s * 10.0**d for s in (0, 1, 5, 2, -1, -5, -2) for d in range(-5, 7)]
    low, high = axes.get_ylim()

    def up(value: float) -> float:
        """Return a height as a part of that of the axes."""
        return float((axes.transScale + axes.transLimits).transform((1, value))[1])

    texts = dict(margins)
    for tick in ticks:
        if low <= tick <= high and all(abs(up(tick) - up(other)) > 0.05 for other in texts):
            texts[tick] = f"{tick:g}"
    axes.set_yticks(list(texts), list(texts.values()))
    axes.set_yticks([], minor=True)
    axes.set_ylim(low, high)


def _tip(subject: Subject, scheme: str, error: Interval) -> str:
    first = subject.first
    facts = [
        f"step {first.step:,}" if first.step is not None else "",
        f"{count(first.tokens)} tokens" if first.tokens is not None else "",
        f"learning rate {first.learning_rate:.3g}" if first.learning_rate is not None else "",
    ]
    if subject.kind == "soup":
        facts = [f"a soup of {len(subject.members)} checkpoints"]
    lines = [subject.label, f"{scheme}: {spread(error, unit=' %')}", ", ".join(filter(None, facts))]
    return "\n".join(line.replace("\n", "?") for line in lines if line)


def series_axis(view: View, panels: Sequence[Axes]) -> None:
    """Mark where stages end and the rate falls; name stages and soups where there is room."""
    where, last = view.axis, panels[-1]
    ends = sorted(where.stage_ends.items(), key=lambda pair: pair[1])
    if len(ends) < 2 or len(where.runs) > 1:  # runs side by side end at the same place
        ends = []
    begins = [min(where.places.values()), *(end for _, end in ends)]
    names = [(stage, (begin + end) / 2) for (stage, end), begin in zip(ends, begins, strict=False)]
    if view.soups:
        places = [where.places[soup.label] for soup in view.soups]
        soup = view.soups[0].label if len(places) == 1 else "soups"
        names.append((soup, sum(places) / len(places)))
    for axes in panels:
        for _, end in ends[:-1]:
            axes.axvline(end, color=FAINT, ls="--", lw=0.7, zorder=1)
        for begin, end in where.falls or ():
            axes.axvspan(begin, end, color=FAINT, alpha=0.1, lw=0, zorder=0)
    low, high = panels[0].get_xlim()
    free, letter = low, (high - low) / 80  # of the narrowest axes
    for text, middle in names:
        half = letter * len(short := name_of(text, 16)) / 2
        if middle - half >= free:
            upwards = panels[0].get_xaxis_transform()
            panels[0].text(middle, 1.02, short, ha="center", transform=upwards)
            free = middle + half + letter
    last.xaxis.set_major_formatter(lambda x, _: count(round(x)))
    last.set_xlabel(where.name)


def _rates(view: View, axes: Axes) -> None:
    axes.set_title("learning rate", color=FAINT, fontweight="normal")
    peak = max(s.first.learning_rate or 0.0 for run in view.axis.runs for s in run)
    for run in view.axis.runs:
        rates = [s.first.learning_rate or 0.0 for s in run]
        axes.plot([view.axis.places[s.label] for s in run], rates, color=INK, marker="o", ms=2)
    axes.margins(y=0.2)
    axes.set_yticks([0.0, peak], ["0", f"{peak:.2g}"])


def _key(view: View, sampled: str) -> str:
    """Return the meaning of bands, hollow marks, stars and shades, as far as they occur."""
    level, where = f"{100 * view.audit.plan.recipe.confidence:g} %", view.axis
    occurs = {
        f"Bands: {level} intervals over {sampled}s": True,
        "hollow: other ingredients": len(where.trunk) < len(view.checkpoints),
        "a line for each run": len(where.runs) > 1,
        "star: soup" if len(view.soups) == 1 else "stars: soups": view.soups,
        "shaded: the learning rate falls": where.falls,
    }
    return f"{'; '.join(words for words, is_there in occurs.items() if is_there)}."


# ------------------------------------------------------------------ quantized

COLUMNS = 4
REACH = 1.15
"""Subjects with more than this times the best loss are left out."""


def quantized(view: View) -> Chart:
    scores = [(s, score.ce) for s in view.subjects if (score := view.score(s.label))]
    best = min((ce.estimate for _, ce in scores if math.isfinite(ce.estimate)), default=0.0)
    contenders = [(s, ce) for s, ce in scores if ce.estimate <= REACH * best]
    stages = dict.fromkeys(s.first.stage for s in view.checkpoints if s.first.stage is not None)
    note = "Across: in full precision. Ring: the lowest loss of a panel. "
    note += "Dashed line: quantization costs nothing."
    if left_out := len(view.subjects) - len(contenders):
        note += f" {left_out} of {len(view.subjects)} are left out: their loss is over "
        note += f"{100 * (REACH - 1):.0f} % above the best."
    title = "Quantized loss against full-precision loss, nats per token"
    rows = -(-len(view.schemes) // COLUMNS)
    chart = Chart(title, note, 1.9 * rows)
    panels = list(chart.figure.subplots(rows, COLUMNS, squeeze=False).flat)
    looks_of = {stage: look_of(k) | {"ls": "none"} for k, stage in enumerate((*stages, None))}
    soup: dict[str, Any] = {"color": INK, "marker": "*", "ms": 8, "ls": "none"}
    chart.legend({s: looks_of[s] for s in stages} | ({"soup": soup} if view.soups else {}))
    for k, (scheme, axes) in enumerate(zip(view.schemes, panels, strict=False)):
        axes.set_title(name_of(scheme, 20))
        axes.axline((best, best), slope=1, color=FAINT, ls="--", lw=0.7, zorder=1)
        axes.margins(0.08)
        axes.locator_params(nbins=4)
        for subject, full in contenders:
            score = view.score(subject.label, scheme)
            if score is None or score.relative_error is None or math.isinf(score.ce.estimate):
                continue
            place = full.estimate, score.ce.estimate
            tip = f"{subject.label}\n{scheme}: loss {loss(score.ce)}, in full precision "
            tip += f"{loss(full)}\n{percent(score.relative_error, unit=' %')} more"
            look = soup if subject.kind == "soup" else looks_of[subject.first.stage]
            chart.marks(axes, str(k), [(*place, tip)], **look)
            if subject.label == view.best(scheme):
                ring: dict[str, Any] = {"ms": 11, "mew": 0.7, "mfc": "none", "mec": INK}
                axes.plot(*place, "o", clip_on=False, **ring)
    for axes in panels[len(view.schemes) :]:
        axes.remove()
    return chart


# ------------------------------------------------------------------ rows

LONGEST_ROW = 36
ROW = 0.2  # inches


def rows_of(axes: Axes, names: Sequence[str]) -> None:
    """Give axes a row for each name, downwards from 0."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [name_of(name, LONGEST_ROW) for name in names])
    axes.grid(visible=False, axis="y")


SOUP_LOOKS: dict[str, dict[str, Any]] = {
    "a_better": {"marker": "o", "color": COLOURS[0]},
    "b_better": {"marker": "s", "color": COLOURS[1]},
    "equivalent": {"marker": "D", "color": INK},
    "inconclusive": {"marker": "D", "color": INK, "mfc": GROUND},
}
SOUP_PANELS = {"outright": "Loss of the quantized models", "difference": "What quantization took"}


def soups(view: View) -> Chart:
    """Draw soup minus ingredient under each scheme: left of zero favours the soup.

    Two panels for two questions that can have opposite answers: which of the quantized models is
    better, and which of them lost less by quantization.
    """
    soup, opponents, rows = drawn_soup(view)
    level = f"{100 * view.audit.plan.recipe.confidence:g} % intervals"
    title = f"{name_of(soup.label, 40)} against its {plural(opponents, 'ingredient')}"
    title += f", one of {len(view.soups)} soups" if len(view.soups) > 1 else ""
    note = f"Left of zero favours the soup; {level}; bold: against the best ingredient."
    chart = Chart(title, note, 0.7 + 0.14 * len(rows))
    verdicts = {c.verdict for row in rows for c in (row.outright, row.difference)}
    chart.legend(
        {MEANINGS[v]: look | {"ls": "none"} for v, look in SOUP_LOOKS.items() if v in verdicts}
    )
    begins = {y for y, row in enumerate(rows) if y == 0 or rows[y - 1].scheme != row.scheme}
    names = [row.scheme if y in begins else "" for y, row in enumerate(rows)]
    panels = chart.figure.subplots(1, 2, sharey=True)
    for axes, (which, what) in zip(panels, SOUP_PANELS.items(), strict=True):
        rows_of(axes, names)
        axes.set_title(what)
        axes.set_xlabel("nats per token, soup minus ingredient")
        axes.axvline(0, color=FAINT, lw=0.7, zorder=1)
        for y, row in enumerate(rows):
            comparison: Comparison = getattr(row, which)
            if y in begins - {0}:
                axes.axhline(y - 0.5, color=FAINT, alpha=0.25, lw=0.7)
            tip = f"{row.scheme}: against {row.opponent}\n"
            tip += f"{spread(comparison.interval)} nats per token: {MEANINGS[comparison.verdict]}\n"
            tip += f"the soup is {soup_reading(row)}"
            look = SOUP_LOOKS[comparison.verdict] | {"lw": 1.6 if row.is_best else 0.7}
            chart.whiskers(axes, which, [(y, comparison.interval, tip)], across=True, **look)
    return chart


def pareto(view: View) -> Chart:
    """Draw the best subject of each scheme, the fewest bits lowest."""
    best = [p for p in points(view) if p.bits_per_weight > 0 and math.isfinite(p.ce.estimate)]
    best.reverse()
    note = "Filled: nothing with fewer bits is better, by estimate."
    if len({p.subject for p in best}) == 1:
        note += f" The best subject is {name_of(best[0].subject)} everywhere."
    title = "What fewer bits cost, each scheme at its best subject"
    chart = Chart(title, note, 0.4 + ROW * len(best))
    axes = chart.figure.subplots()
    rows_of(axes, [f"{p.scheme}, {p.bits_per_weight:.2f} bits" for p in best])
    axes.set_xlabel("loss, nats per token")
    front = [(p.ce.estimate, y) for y, p in enumerate(best) if p.on_front]
    axes.step(*zip(*front, strict=True), where="pre", color=FAINT, lw=0.7, zorder=2)
    look = looks(view.schemes)
    for y, p in enumerate(best):
        tip = f"{p.scheme}: {p.bits_per_weight:.2f} bits per weight\n{p.subject}\n"
        tip += f"loss {spread(p.ce)} nats per token"
        style = look.get(p.scheme, {"color": INK, "marker": "o"})
        chart.marks(axes, "0", [(p.ce.estimate, y, tip)], filled=p.on_front, **style)
    return chart


DRAWERS: dict[str, Callable[[View], Chart]] = {
    draw.__name__: draw for draw in (trajectory, accuracy, quantized, soups, pareto)
}
