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
    MARGIN,
    NAME_HEIGHT,
    POINT,
    WIDTH,
    Chart,
    bounds,
    fitted,
    look_of,
    looks,
    name_of,
)
from qaudit.report.format import count, listing, loss, percent, pixels_of, plural, spread
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

LEFT, RIGHT = 58.0, 700.0
MANY = 40  # marks of one line that are told apart


def trajectory(view: View) -> Chart:
    """Draw added losses, and the margins, each with the classes of bits that have it."""
    classes: dict[float, list[str]] = {}  # by margin, in percent
    for decision in view.classes:
        of_loss = decision.unit == "fraction" and decision.metric in (None, "relative_error")
        if decision.margin and of_loss:
            classes.setdefault(100 * decision.margin, []).append(decision.bit_class)
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
    where, has_rates = view.axis, view.axis.phases is not None
    bottom = 34 + max(300.0, NAME_HEIGHT * len(view.schemes))
    chart = Chart(title, _key(view, sampled), bottom + (128 if has_rates else 52))
    left = LEFT + 100 * bool(margins)  # beside the numbers is what is allowed
    axes = chart.axes(left, RIGHT, 34, bottom, unit)
    soups = {s.label: where.soup_position(k, len(view.soups)) for k, s in enumerate(view.soups)}
    places = where.positions | soups
    errors = {
        (s.label, scheme): Interval(100 * e.estimate, 100 * e.low, 100 * e.high)
        for s in view.subjects
        for scheme in view.schemes
        if (e := error_of(s.label, scheme)) and math.isfinite(e.estimate)
    }
    room = 0.02 * ((max(places.values()) - min(places.values())) or 1.0)
    axes.set_xlim(min(places.values()) - room, max(places.values()) + room)
    _error_scale(axes, list(errors.values()), margins)
    for margin in margins:
        axes.axhline(margin, color=INK, ls=(0, (6, 4)), lw=POINT, zorder=2)
    for k, (scheme, look) in enumerate(looks(view.schemes).items()):
        at = {label: (places[label], e) for (label, s), e in errors.items() if s == scheme}
        _scheme(view, chart, axes, (str(k), scheme, look), at)
    last = [*reversed(view.soups), *reversed(view.axis.trunk)]
    ends = {
        scheme: next(errors[s.label, scheme].estimate for s in last if (s.label, scheme) in errors)
        for scheme in view.schemes
        if any((s.label, scheme) in errors for s in last)
    }
    chart.names_at(axes, RIGHT, ends)
    panels = [axes]
    if has_rates:
        panels.append(_rates(view, chart, axes, bottom))
    _stages(view, panels)
    panels[-1].spines["bottom"].set_visible(True)
    panels[-1].xaxis.set_major_formatter(lambda x, _: count(round(x)))
    panels[-1].set_xlabel(where.name)
    return chart


def _error_scale(axes: Axes, errors: Sequence[Interval], margins: Mapping[float, str]) -> None:
    """Let errors far apart be on a logarithmic scale that is linear up to the least margin.

    So nothing below what a policy allows looks large. Margins replace the numbers beside them.
    """
    values = [e.estimate for e in errors] or [0.0]
    low, high = min(0.0, *values), max(0.0, *values, *margins)
    positive = [v for v in values if v > 0]
    quarter = max(1e-3, sorted(map(abs, values))[len(values) // 4])
    straight = min(margins, default=float(f"{quarter:.0e}"))
    if not positive or max(positive) < FAR * min(positive) or high <= 2 * straight:
        low = min(low, *(e.low for e in errors if math.isfinite(e.low)), 0.0)
        high = max(high, *(e.high for e in errors if math.isfinite(e.high)), 0.0)
        near = 0.05 * (high - low)
        room = near or 1.0
        axes.set_ylim(low - room, high + room)
        ticks = [tick for tick in axes.get_yticks() if low - room <= tick <= high + room]
        ticks = [tick for tick in ticks if all(abs(tick - m) > near for m in margins)]
    else:
        axes.set_yscale("symlog", linthresh=straight, linscale=0.8)
        axes.set_ylim(min(1.5 * low, -0.12 * straight), 1.5 * high)
        steps = [s * 10.0**d for d in range(-5, 7) for s in (1, 2, 5)]
        ticks = [straight / 2, straight, *(t for t in steps if t > 1.3 * straight)]
        ticks = [0.0, *(t for t in ticks if t <= 1.5 * high), *(-t for t in ticks if -t >= low)]
        ticks = [t for t in ticks if all(not 0.8 < t / m < 1.25 for m in margins)]
    texts = {tick: f"{tick:g}" for tick in ticks} | dict(margins)
    axes.set_yticks(list(texts), list(texts.values()))
    axes.set_yticks([], minor=True)


def _scheme(
    view: View,
    chart: Chart,
    axes: Axes,
    drawn_as: tuple[str, str, dict[str, Any]],
    at: Mapping[str, tuple[float, Interval]],
) -> None:
    """Draw the main line with its band, other ingredients and soups of a scheme."""
    series, scheme, look = drawn_as
    chart.names[series] = scheme
    main = {s.label for s in view.axis.trunk}
    for run in view.axis.runs:
        if measured := [at[s.label] for s in run if s.label in at]:
            chart.curve(axes, series, measured, **look)
    others = [at[s.label] for s in view.subjects if s.label in at and s.label not in main]
    chart.whiskers(axes, series, others, color=look["color"])
    look = {"color": look["color"], "marker": look["marker"]}
    if len(main) > MANY:
        look["ms"] = 3 * POINT
    hollow = [s for s in view.checkpoints if s.label not in main]
    star = look | {"marker": "*", "ms": 11 * POINT}
    for subjects, filled, kind in (
        (view.axis.trunk, True, look),
        (hollow, False, look),
        (view.soups, True, star),
    ):
        placed = [(s, *at[s.label]) for s in subjects if s.label in at]
        marks = [(x, e.estimate, _tip(s, scheme, e)) for s, x, e in placed]
        chart.marks(axes, series, marks, filled=filled, **kind)


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


def _stages(view: View, panels: Sequence[Axes]) -> None:
    """Mark where stages end and the rate falls; name stages and soups where there is room."""
    where = view.axis
    ends = sorted(where.stage_ends.items(), key=lambda pair: pair[1])
    if len(ends) < 2 or len(where.runs) > 1:  # runs side by side end at the same place
        ends = []
    begins = [min(where.positions.values()), *(end for _, end in ends)]
    names = [(stage, (begin + end) / 2) for (stage, end), begin in zip(ends, begins, strict=False)]
    if view.soups:
        places = [where.soup_position(k, len(view.soups)) for k in range(len(view.soups))]
        soup = view.soups[0].label if len(places) == 1 else "soups"
        names.append((soup, sum(places) / len(places)))
    for axes in panels:
        for _, end in ends[:-1]:
            axes.axvline(end, color=FAINT, ls="--", lw=POINT, zorder=1)
        for name, begin, end in where.phases or ():
            if name == "falls":
                axes.axvspan(begin, end, color=FAINT, alpha=0.1, lw=0, zorder=0)
    _in_a_row(panels[0], names, 1.02)


def _in_a_row(axes: Axes, names: Sequence[tuple[str, float]], up: float, **style: Any) -> None:
    """Write names side by side, without those that would overlap the one before."""
    low, high = axes.get_xlim()
    pixels, free = axes.get_position().width * WIDTH / (high - low), low
    for text, middle in names:
        half = pixels_of(short := name_of(text, 16)) / 2 / pixels
        if middle - half >= free:
            axes.text(middle, up, short, ha="center", transform=axes.get_xaxis_transform(), **style)
            free = middle + half + 8 / pixels


def _rates(view: View, chart: Chart, above: Axes, bottom: float) -> Axes:
    left = WIDTH * above.get_position().x0
    axes = chart.axes(left, RIGHT, bottom + 34, bottom + 84, "learning rate", sharex=above)
    above.tick_params(labelbottom=False)
    above.spines["bottom"].set_visible(False)
    peak = 0.0
    for run in view.axis.runs:
        rates = [s.first.learning_rate or 0.0 for s in run]
        peak = max(peak, *rates)
        look: dict[str, Any] = {"marker": "o" if len(run) <= MANY else "", "ms": 4 * POINT}
        places = [view.axis.positions[s.label] for s in run]
        axes.plot(places, rates, clip_on=False, color=INK, **look)
    axes.set_ylim(-0.05 * (peak or 1.0), 1.1 * (peak or 1.0))
    axes.set_yticks([0.0, peak] if peak else [0.0])
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:.2g}")
    named = [(name, (begin + end) / 2) for name, begin, end in view.axis.phases or ()]
    _in_a_row(axes, named, 0.12, color=FAINT)
    return axes


def _key(view: View, sampled: str) -> str:
    """Return the meaning of bands, hollow marks, stars and shades, as far as they occur."""
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    words = [f"Bands: {level} intervals over {sampled}s"]
    if len(view.axis.trunk) < len(view.checkpoints):
        words.append("hollow: other ingredients")
    if len(view.axis.runs) > 1:
        words.append("a line for each run")
    if view.soups:
        words.append("star: soup" if len(view.soups) == 1 else "stars: soups")
    if any(name == "falls" for name, *_ in view.axis.phases or ()):
        words.append("shaded: the learning rate falls")
    return f"{'; '.join(words)}."


# ------------------------------------------------------------------ quantized

SOUP = "\0soup"  # no stage has this name
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
    chart = Chart(title, note, 36 + 214 * -(-len(view.schemes) // 4))
    looks_of = {stage: look_of(k) | {"ls": "none"} for k, stage in enumerate((*stages, None))}
    looks_of[SOUP] = {"color": INK, "marker": "*", "ms": 10 * POINT}
    entries = [(name_of(stage, 16), looks_of[stage] | {"ms": 7 * POINT}) for stage in stages]
    chart.legend(entries + [("soup", looks_of[SOUP])] * bool(view.soups))
    for k, scheme in enumerate(view.schemes):
        left, top = 54 + 208 * (k % 4), 40 + 214 * (k // 4)
        axes = chart.axes(left, left + 158, top, top + 156)
        axes.set_title(name_of(scheme, 20), loc="left", fontsize=12 * POINT, fontweight="bold")
        axes.spines["bottom"].set_visible(True)
        axes.axline((best, best), slope=1, color=FAINT, ls="--", lw=POINT, zorder=1)
        kinds: dict[str | None, list[tuple[float, float, str]]] = {}
        for subject, full in contenders:
            score = view.score(subject.label, scheme)
            if score is None or score.relative_error is None or math.isinf(score.ce.estimate):
                continue
            place = full.estimate, score.ce.estimate
            tip = f"{subject.label}\n{scheme}: loss {loss(score.ce)}, in full precision "
            tip += f"{loss(full)}\n{percent(score.relative_error, unit=' %')} more"
            kind = SOUP if subject.kind == "soup" else subject.first.stage
            kinds.setdefault(kind, []).append((*place, tip))
            if subject.label == view.best(scheme):
                ring: dict[str, Any] = {"ms": 15 * POINT, "mew": POINT, "mfc": "none", "mec": INK}
                axes.plot(*place, "o", clip_on=False, **ring)
        for kind, marks in kinds.items():
            chart.marks(axes, str(k), marks, **looks_of[kind])
        sides = list(zip(*(mark[:2] for marks in kinds.values() for mark in marks), strict=True))
        for name, side in zip("xy", sides, strict=False):
            room = 0.08 * (max(side) - min(side)) or 0.05
            axes.set(**{f"{name}lim": (min(side) - room, max(side) + room)})
        axes.locator_params(nbins=4)
    return chart


# ------------------------------------------------------------------ rows


def rows_of(
    chart: Chart, sides: tuple[float, float], top: float, names: Sequence[str], step: float = 20
) -> Axes:
    """Return axes with a row for each name, downwards from 0."""
    axes = chart.axes(*sides, top, top + step * len(names))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [fitted(name, sides[0] - MARGIN - 8) for name in names])
    axes.grid(visible=False, axis="y")
    axes.spines["bottom"].set_visible(True)
    return axes


def interval_across(axes: Axes, row: float, interval: Interval, **style: Any) -> None:
    """Draw an interval as a line across."""
    (low,), (high,) = bounds([interval])
    axes.hlines(row, low, high, zorder=3, **({"lw": POINT} | style))


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
    chart = Chart(title, note, 102 + 14 * len(rows))
    verdicts = {c.verdict for row in rows for c in (row.outright, row.difference)}
    looks_of_verdicts = {v: look for v, look in SOUP_LOOKS.items() if v in verdicts}
    chart.legend(
        [(MEANINGS[v], {**look, "ms": 7 * POINT}) for v, look in looks_of_verdicts.items()]
    )
    begins = {y for y, row in enumerate(rows) if y == 0 or rows[y - 1].scheme != row.scheme}
    names = [row.scheme if y in begins else "" for y, row in enumerate(rows)]
    left = 116.0
    for which, what in SOUP_PANELS.items():
        axes = rows_of(chart, (left, left + 356), 44, names, 14)
        axes.set_title(what, loc="left", fontsize=12 * POINT, fontweight="bold")
        axes.set_xlabel("nats per token, soup minus ingredient")
        axes.axvline(0, color=FAINT, lw=POINT, zorder=1)
        for y, row in enumerate(rows):
            comparison: Comparison = getattr(row, which)
            if y in begins - {0}:
                axes.axhline(y - 0.5, color=FAINT, alpha=0.25, lw=POINT)
            if not math.isfinite(comparison.interval.estimate):
                continue
            tip = f"{row.scheme}: against {row.opponent}\n"
            tip += f"{spread(comparison.interval)} nats per token: {MEANINGS[comparison.verdict]}\n"
            tip += f"the soup is {soup_reading(row)}"
            look = SOUP_LOOKS[comparison.verdict]
            width = (2.2 if row.is_best else 1) * POINT
            interval_across(axes, y, comparison.interval, color=look["color"], lw=width)
            chart.marks(axes, which, [(comparison.interval.estimate, y, tip)], **look)
        left, names = left + 372, [""] * len(rows)
    return chart


def pareto(view: View) -> Chart:
    """Draw the best subject of each scheme, the fewest bits lowest."""
    best = [p for p in points(view) if p.bits_per_weight > 0 and math.isfinite(p.ce.estimate)]
    best.reverse()
    note = "Filled: nothing with fewer bits is better, by estimate."
    if len({p.subject for p in best}) == 1:
        note += f" The best subject is {name_of(best[0].subject)} everywhere."
    title = "What fewer bits cost, each scheme at its best subject"
    chart = Chart(title, note, 66 + 20 * len(best))
    names = [f"{p.scheme}, {p.bits_per_weight:.2f} bits" for p in best]
    axes = rows_of(chart, (190, 830), 10, names)
    axes.set_xlabel("loss, nats per token")
    front = [(p.ce.estimate, y) for y, p in enumerate(best) if p.on_front]
    axes.step(*zip(*front, strict=True), where="pre", color=FAINT, lw=POINT, zorder=2)
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
