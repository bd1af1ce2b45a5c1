"""The figures of an audit: the series, full precision against quantized, soups, fewer bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from qaudit.report.losses import MOST_LINEARS
from qaudit.report.series import (
    MEANINGS,
    Axis,
    axis,
    drawn_soup,
    knows_rates,
    phases,
    runs,
    soup_position,
    soup_reading,
    trunk,
)
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
    return _along(
        view,
        view.error,
        "What quantization adds to the loss, along the series",
        "added loss, %",
        view.unit,
        _margins(view),
    )


def accuracy(view: View) -> Chart:
    """Draw the drop of accuracy, of the mean over tasks or the only task."""
    drops = {(row.subject, row.scheme): row.accuracy_drop for row in view.audit.tasks}
    return _along(
        view,
        lambda subject, scheme: drops.get((subject, scheme)),
        "What quantization costs of accuracy on tasks, along the series",
        "accuracy lost, % of what full precision gets wrong",
        "item",
        {},
    )


def _margins(view: View) -> dict[float, str]:
    """Return the margins of added loss, in percent, each with the classes of bits that have it."""
    classes: dict[float, list[str]] = {}
    for decision in view.classes:
        of_loss = decision.unit == "fraction" and decision.metric in (None, "relative_error")
        if decision.margin and of_loss:
            classes.setdefault(100 * decision.margin, []).append(decision.bit_class)
    return {m: f"margin at {_bits(names)}: {m:g}" for m, names in classes.items()}


def _bits(classes: list[str]) -> str:
    return listing(classes) + " bits" * classes[-1].isdecimal()


def _along(
    view: View, error_of: Errors, title: str, unit: str, sampled: str, margins: Mapping[float, str]
) -> Chart:
    where, has_rates = axis(view), knows_rates(view)
    bottom = 34 + max(300.0, NAME_HEIGHT * len(view.schemes))
    chart = Chart(title, _key(view, sampled), bottom + (128 if has_rates else 52))
    left = LEFT + 100 * bool(margins)  # beside the numbers is what is allowed
    axes = chart.axes(left, RIGHT, 34, bottom, unit)
    places = {s.label: where.positions[s.label] for s in view.checkpoints}
    places |= {s.label: soup_position(where, k, len(view.soups)) for k, s in enumerate(view.soups)}
    errors = {
        (s.label, scheme): Interval(100 * e.estimate, 100 * e.low, 100 * e.high)
        for s in view.subjects
        for scheme in view.schemes
        if s.label in places and (e := error_of(s.label, scheme)) and math.isfinite(e.estimate)
    }
    room = 0.02 * ((max(places.values()) - min(places.values())) or 1.0)
    axes.set_xlim(min(places.values()) - room, max(places.values()) + room)
    _error_scale(axes, list(errors.values()), margins)
    for margin in margins:
        axes.axhline(margin, color=INK, ls=(0, (6, 4)), lw=POINT, zorder=2)
    for k, (scheme, look) in enumerate(looks(view.schemes).items()):
        at = {label: (places[label], e) for (label, s), e in errors.items() if s == scheme}
        _scheme(view, chart, axes, where, (str(k), scheme, look), at)
    last = [*reversed(view.soups), *reversed(trunk(view))]
    ends = {
        scheme: next(errors[s.label, scheme].estimate for s in last if (s.label, scheme) in errors)
        for scheme in view.schemes
        if any((s.label, scheme) in errors for s in last)
    }
    chart.names_at(axes, RIGHT, ends)
    panels = [axes]
    if has_rates:
        panels.append(_rates(view, chart, where, axes, bottom))
    _stages(view, chart, where, panels)
    panels[-1].spines["bottom"].set_visible(True)
    panels[-1].xaxis.set_major_formatter(lambda x, _: count(round(x)))
    panels[-1].set_xlabel(where.name)
    return chart


def _error_scale(axes: Axes, errors: Sequence[Interval], margins: Mapping[float, str]) -> None:
    """Let errors far apart be on a logarithmic scale that is linear up to the least margin.

    So nothing below what a policy allows looks large.
    """
    values = [e.estimate for e in errors] or [0.0]
    low, high = min(0.0, *values), max(0.0, *values, *margins)
    positive = [v for v in values if v > 0]
    straight = min(margins, default=_round_down(sorted(map(abs, values))[len(values) // 4]))
    if not positive or max(positive) < FAR * min(positive) or high <= 2 * straight:
        low = min(low, *(e.low for e in errors if math.isfinite(e.low)), 0.0)
        high = max(high, *(e.high for e in errors if math.isfinite(e.high)), 0.0)
        room = 0.05 * (high - low) or 1.0
        axes.set_ylim(low - room, high + room)
        ticks = [tick for tick in axes.get_yticks() if low - room <= tick <= high + room]
        _ticks(axes, ticks, margins, 0.05 * (high - low))
        return
    axes.set_yscale("symlog", linthresh=straight, linscale=0.8)
    axes.set_ylim(min(1.5 * low, -0.12 * straight), 1.5 * high)
    steps = [s * 10.0**d for d in range(-5, 7) for s in (1, 2, 5)]
    ticks = [straight / 2, straight, *(t for t in steps if t > 1.3 * straight)]
    ticks = [0.0, *(t for t in ticks if t <= 1.5 * high), *(-t for t in ticks if -t >= 1.5 * low)]
    _ticks(axes, [t for t in ticks if all(not 0.8 < t / m < 1.25 for m in margins)], margins, 0.0)


def _ticks(axes: Axes, ticks: Sequence[float], margins: Mapping[float, str], near: float) -> None:
    """Number an axis, and name its margins in place of the numbers beside them."""
    texts = {t: f"{t:g}" for t in ticks if all(abs(t - m) > near for m in margins)} | dict(margins)
    axes.set_yticks(list(texts), list(texts.values()))
    axes.set_yticks([], minor=True)


def _round_down(value: float) -> float:
    """Return the largest 1, 2 or 5 of a decade that is not above a value, and at least 0.001."""
    value = max(1e-3, value)
    decade = 10.0 ** math.floor(math.log10(value))
    return max((step * decade for step in (1, 2, 5) if step * decade <= value), default=decade)


def _scheme(
    view: View,
    chart: Chart,
    axes: Axes,
    where: Axis,
    drawn_as: tuple[str, str, dict[str, Any]],
    at: Mapping[str, tuple[float, Interval]],
) -> None:
    """Draw the main line with its band, other ingredients and soups of a scheme."""
    series, scheme, look = drawn_as
    chart.names[series] = scheme
    main = {s.label for s in trunk(view)}
    for run in runs(view, where):
        if measured := [at[s.label] for s in run if s.label in at]:
            chart.curve(axes, series, measured, **look)
    style = {"color": look["color"], "ls": look["ls"]}
    for line in _siblings(view, {label: (x, e.estimate) for label, (x, e) in at.items()}):
        axes.plot(*zip(*line, strict=True), gid=chart.group(series), zorder=3, **style)
    others = [at[s.label] for s in view.subjects if s.label in at and s.label not in main]
    chart.whiskers(axes, series, others, color=look["color"])
    look = {"color": look["color"], "marker": look["marker"]}
    if len(main) > MANY:
        look["ms"] = 3 * POINT

    def points_of(subjects: Sequence[Subject]) -> list[tuple[float, float, str]]:
        return [
            (at[s.label][0], at[s.label][1].estimate, _tip(s, scheme, at[s.label][1]))
            for s in subjects
            if s.label in at
        ]

    chart.marks(axes, series, points_of(trunk(view)), **look)
    beside = [s for s in view.checkpoints if s.label not in main]
    chart.marks(axes, series, points_of(beside), filled=False, **look)
    chart.marks(axes, series, points_of(view.soups), **(look | {"marker": "*", "ms": 11 * POINT}))


def _siblings(
    view: View, places: Mapping[str, tuple[float, float]]
) -> Iterator[list[tuple[float, float]]]:
    """Yield a line for each other ingredient, from the checkpoint that it was trained on from."""
    lines: dict[tuple[str | None, int | None], list[tuple[float, float]]] = {}
    main = {subject.label for subject in trunk(view)}
    before: dict[str | None, tuple[float, float]] = {}  # of a stage, the last of the one before
    last: tuple[str | None, tuple[float, float]] | None = None
    for subject in view.checkpoints:
        if (at := places.get(subject.label)) is None:
            continue
        stage = subject.first.stage
        if last is not None and last[0] != stage:
            before.setdefault(stage, last[1])
        if subject.label in main:
            last = stage, at
        else:
            fork = [before[stage]] if stage in before else []
            lines.setdefault((stage, subject.first.ingredient), fork).append(at)
    return (line for line in lines.values() if len(line) > 1)


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


def _stages(view: View, chart: Chart, where: Axis, panels: Sequence[Axes]) -> None:
    """Mark where stages end and the rate falls; name stages and soups where there is room."""
    ends = sorted(where.stage_ends.items(), key=lambda pair: pair[1])
    if len(ends) < 2 or len(runs(view, where)) > 1:  # runs side by side end at the same place
        ends = []
    begins = [min(where.positions.values()), *(end for _, end in ends)]
    names = [(stage, (begin + end) / 2) for (stage, end), begin in zip(ends, begins, strict=False)]
    if view.soups:
        places = [soup_position(where, k, len(view.soups)) for k in range(len(view.soups))]
        soup = view.soups[0].label if len(places) == 1 else "soups"
        names.append((soup, sum(places) / len(places)))
    for axes in panels:
        for _, end in ends[:-1]:
            axes.axvline(end, color=FAINT, ls="--", lw=POINT, zorder=1)
        for phase in phases(view, where):
            if phase.name == "falls":
                axes.axvspan(phase.begin, phase.end, color=FAINT, alpha=0.1, lw=0, zorder=0)
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


def _rates(view: View, chart: Chart, where: Axis, above: Axes, bottom: float) -> Axes:
    left = WIDTH * above.get_position().x0
    axes = chart.axes(left, RIGHT, bottom + 34, bottom + 84, "learning rate", sharex=above)
    above.tick_params(labelbottom=False)
    above.spines["bottom"].set_visible(False)
    peak = 0.0
    for run in runs(view, where):
        rates = [s.first.learning_rate or 0.0 for s in run]
        peak = max(peak, *rates)
        look: dict[str, Any] = {
            "color": INK,
            "marker": "o" if len(run) <= MANY else "",
            "ms": 4 * POINT,
        }
        axes.plot([where.positions[s.label] for s in run], rates, clip_on=False, **look)
    axes.set_ylim(-0.05 * (peak or 1.0), 1.1 * (peak or 1.0))
    axes.set_yticks([0.0, peak] if peak else [0.0])
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:.2g}")
    named = [(p.name, (p.begin + p.end) / 2) for p in phases(view, where)]
    _in_a_row(axes, named, 0.12, color=FAINT)
    return axes


def _key(view: View, sampled: str) -> str:
    """Return the meaning of bands, hollow marks, stars and shades, as far as they occur."""
    level = f"{100 * view.audit.plan.recipe.confidence:g} %"
    words = [f"Bands: {level} intervals over {sampled}s"]
    if len(trunk(view)) < len(view.checkpoints):
        words.append("hollow: other ingredients")
    if len(runs(view, axis(view))) > 1:
        words.append("a line for each run")
    if view.soups:
        words.append("star: soup" if len(view.soups) == 1 else "stars: soups")
    if any(phase.name == "falls" for phase in phases(view, axis(view))):
        words.append("shaded: the learning rate falls")
    return f"{'; '.join(words)}."


# ------------------------------------------------------------------ quantized

REACH = 1.15
"""Subjects with more than this times the best loss are left out."""


def quantized(view: View) -> Chart:
    scores = [(s, score.ce) for s in view.subjects if (score := view.score(s.label))]
    best = min((ce.estimate for _, ce in scores if math.isfinite(ce.estimate)), default=0.0)
    contenders = [(s, ce) for s, ce in scores if ce.estimate <= REACH * best]
    stages = sorted(
        dict.fromkeys(s.first.stage for s in view.checkpoints), key=lambda stage: stage is None
    )
    note = "Across: in full precision. Ring: the lowest loss of a panel. "
    note += "Dashed line: quantization costs nothing."
    if left_out := len(view.subjects) - len(contenders):
        note += f" {left_out} of {len(view.subjects)} are left out: their loss is over "
        note += f"{100 * (REACH - 1):.0f} % above the best."
    rows = -(-len(view.schemes) // 4)
    title = "Quantized loss against full-precision loss, nats per token"
    chart = Chart(title, note, 36 + 214 * rows)
    entries = [(name_of(s, 16), {**look_of(k), "ms": 7 * POINT}) for k, s in enumerate(stages) if s]
    entries += [("soup", {"color": INK, "marker": "*", "ms": 10 * POINT})] if view.soups else []
    chart.legend(entries)
    for k, scheme in enumerate(view.schemes):
        left, top = 54 + 208 * (k % 4), 40 + 214 * (k // 4)
        axes = chart.axes(left, left + 158, top, top + 156)
        axes.set_title(name_of(scheme, 20), loc="left", fontsize=12 * POINT, fontweight="bold")
        axes.spines["bottom"].set_visible(True)
        lows, highs = _panel(view, chart, axes, scheme, (str(k), contenders, stages))
        if lows:
            axes.axline((best, best), slope=1, color=FAINT, ls="--", lw=POINT, zorder=1)
            room = 0.08 * (highs[0] - lows[0]) or 0.05
            axes.set_xlim(lows[0] - room, highs[0] + room)
            room = 0.08 * (highs[1] - lows[1]) or 0.05
            axes.set_ylim(lows[1] - room, highs[1] + room)
        axes.locator_params(nbins=4)
    return chart


def _panel(
    view: View,
    chart: Chart,
    axes: Axes,
    scheme: str,
    drawn_as: tuple[str, list[tuple[Subject, Interval]], list[str | None]],
) -> tuple[list[float], list[float]]:
    """Draw the subjects under a scheme; return the least and the largest losses, both ways."""
    series, contenders, stages = drawn_as
    kinds: dict[int | None, list[tuple[float, float, str]]] = {}
    for subject, full in contenders:
        score = view.score(subject.label, scheme)
        if score is None or score.relative_error is None or not math.isfinite(score.ce.estimate):
            continue
        kind = stages.index(subject.first.stage) if subject.kind == "checkpoint" else None
        tip = f"{subject.label}\n{scheme}: loss {loss(score.ce)}, in full precision {loss(full)}\n"
        tip += f"{percent(score.relative_error, unit=' %')} more"
        kinds.setdefault(kind, []).append((full.estimate, score.ce.estimate, tip))
        if subject.label == view.best(scheme):
            ring: dict[str, Any] = {
                "marker": "o",
                "ms": 15 * POINT,
                "mfc": "none",
                "mec": INK,
                "mew": POINT,
            }
            axes.plot([full.estimate], [score.ce.estimate], ls="none", clip_on=False, **ring)
    for kind, marks in kinds.items():
        look = {k: v for k, v in look_of(kind or 0).items() if k != "ls"}
        soup = {"color": INK, "marker": "*", "ms": 10 * POINT}
        chart.marks(axes, series, marks, **(soup if kind is None else look))
    all_marks = [point[:2] for marks in kinds.values() for point in marks]
    sides = list(zip(*all_marks, strict=True))
    return [min(side) for side in sides], [max(side) for side in sides]


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


def mixture(view: View) -> Chart:
    """Draw how many bits each linear of a mixture has, linears by blocks."""
    row = view.mixture
    assert row is not None, "nothing was measured in bits that differ"
    names, blocks = list(row.mixture)[:MOST_LINEARS], max(1, *map(len, row.mixture.values()))
    note = f"{row.subject} at {row.scheme}: {row.bits_per_weight:.2f} bits per weight."
    if left_out := len(row.mixture) - len(names):
        note += f" {plural(left_out, 'linear')} more: in audit.json."
    kinds = sorted(set("".join(row.mixture.values())) - {"0"})
    chart = Chart(f"Bits of each linear, {row.scheme}", note, 92 + 20 * len(names))
    looks_of_bits = {bits: _shade(int(bits)) for bits in kinds}
    sized = [(f"{bits} bits", {**look, "ms": 11 * POINT}) for bits, look in looks_of_bits.items()]
    chart.legend(sized)
    axes = rows_of(chart, (190, 830), 30, [fitted(name, 170) for name in names])
    axes.set_xlim(-0.5, blocks - 0.5)
    axes.set_xlabel("block")
    axes.locator_params(axis="x", integer=True)
    axes.grid(visible=False)
    size = min(16.0, 640 / blocks) * POINT
    for bits, look in looks_of_bits.items():
        cells = [
            (float(block), float(y), f"{name}, block {block}\n{bits} bits")
            for y, name in enumerate(names)
            for block, digit in enumerate(row.mixture[name])
            if digit == bits
        ]
        chart.marks(axes, bits, cells, ms=size, **look)
    return chart


def _shade(bits: int) -> dict[str, Any]:
    """Return the look of a width: more bits are darker."""
    return {"color": COLOURS[0], "marker": "s", "alpha": 0.1 + 0.9 * (bits - 2) / 6}


DRAWERS: dict[str, Callable[[View], Chart]] = {
    "trajectory": trajectory,
    "accuracy": accuracy,
    "quantized": quantized,
    "soups": soups,
    "pareto": pareto,
    "mixture": mixture,
}
