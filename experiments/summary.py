"""What an experiment showed, as JSON, Markdown and a picture: claims, contrasts, all seeds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.table import Claim, ContrastResult, ExperimentSummary
from qaudit.report import document as doc
from qaudit.report.chart import COLOURS, FAINT, INK, Chart, bounds, drawing, look_of
from qaudit.report.format import NOT_MEASURED, count, or_dash, percent, plural, spread
from qaudit.report.markdown import render_blocks
from qaudit.report.plots import ROW, rows_of
from qaudit.saved.codec import text_of
from qaudit.types import Interval
from qaudit.whole import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMA = "1"
STANDINGS = {
    "agrees": "agrees",
    "disagrees": "disagrees",
    "inconclusive": "inconclusive",
    "open": "nothing expected",
    "too wide": "margin exceeds the errors",
    "not measured": NOT_MEASURED,
}
EXPECTED = {"higher": "> 0", "lower": "< 0", None: ""}
UNITS = {
    "error": "% points",
    "lost": "nats lost",
    "loss": "nats",
    "kl": "nats of KL",
    "trace": "log of the Hessian's trace",
}


def summary_to_json(summary: ExperimentSummary) -> str:
    return text_of({"schema": SCHEMA, **asdict(summary)})


def write_summary(summary: ExperimentSummary, folder: Path) -> None:
    texts = {"summary.json": summary_to_json(summary), "summary.md": render_summary(summary)}
    if summary.points:
        texts["summary.svg"] = svg_of(summary)
    for file, text in texts.items():
        write_whole(folder / file, text)


def render_summary(summary: ExperimentSummary) -> str:
    blocks: list[doc.Block] = [description(summary)]
    for claim in summary.claims:
        source = doc.paragraph(doc.words(claim.source))
        blocks.append(doc.Section(claim.says, (source, table(summary, claim))))
    blocks += [doc.bullets(*summary.notes)] if summary.notes else []
    title = f"{summary.experiment}, size {summary.size}"
    return f"{render_blocks([doc.Section(title, tuple(blocks))], level=1)}\n"


def description(summary: ExperimentSummary) -> doc.Paragraph:
    seeds = plural(len(summary.seeds), "seed")
    sentences = [
        summary.description,
        f"{count(summary.parameters)} parameters, {count(summary.tokens)} tokens trained on for "
        f"each of {seeds}, {plural(summary.documents, 'evaluation document')}.",
        f"Intervals at {100 * summary.confidence:g} %: of a seed over documents, paired; over "
        "seeds by Student's t on one number per seed.",
    ]
    if len(summary.seeds) < 2:
        sentences.append(
            "One seed tells of one pair of models and not of training: nothing is claimed."
        )
    elif len(summary.seeds) < 6:
        sentences.append(
            f"With {seeds} that interval is wide, and an effect has to be large against the "
            "spread of seeds to be seen."
        )
    return doc.paragraph(*sentences)


def table(summary: ExperimentSummary, claim: Claim) -> doc.TableBlock:
    """Return the contrasts of a claim, one row for each scheme."""
    rows = []
    for result in summary.results:
        contrast, words = result.contrast, doc.words
        if contrast.claim != claim.name:
            continue
        is_share = contrast.measure == "error"
        intervals = {seed.seed: seed.interval for seed in result.seeds}
        shown = [intervals.get(seed) for seed in summary.seeds] + [result.interval]
        models = (*doc.code(contrast.a), *words(" minus "), *doc.code(contrast.b))
        standing = words(STANDINGS[result.standing])
        within = f"within {100 * contrast.margin if is_share else contrast.margin:g}"
        rows.append(
            doc.row(
                doc.cell(
                    (*words(f"{contrast.says}: "), *models, *words(f", {UNITS[contrast.measure]}"))
                ),
                contrast.scheme,
                within if contrast.expect == "near" else EXPECTED[contrast.expect],
                *(or_dash(interval, percent if is_share else spread) for interval in shown),
                doc.cell(doc.strong(standing) if result.standing == "disagrees" else standing),
            )
        )
    seeds = [f"seed {seed}" for seed in summary.seeds]
    return doc.table(("contrast", "scheme", "expected", *seeds, "over seeds", ""), rows)


PANELS = {  # measures that share an axis, and its name
    ("error",): "added losses, % points",
    ("lost", "loss"): "losses, nats per token",
    ("kl",): "KL from full precision, nats per token",
    ("trace",): "logarithms of the Hessian's trace",
}
MEANINGS = {
    "agrees": (COLOURS[2], "as expected"),
    "disagrees": (COLOURS[1], "against expectation"),
    "inconclusive": (FAINT, "inconclusive"),
    "open": (COLOURS[0], "nothing expected"),
    "too wide": (FAINT, "margin exceeds the errors"),
}


def svg_of(summary: ExperimentSummary) -> str:
    """Draw the errors of all models above, the contrasts in percentage points or nats below.

    Models are in the order of the experiment's file, which is no order in time: no line joins them.
    """
    schemes = tuple(dict.fromkeys(point.scheme for point in summary.points))
    groups = {
        what: [r for r in summary.results if r.seeds and r.contrast.measure in measures]
        for measures, what in PANELS.items()
    }
    groups = {what: results for what, results in groups.items() if results}
    tall = max(0.24, 0.12 * len(schemes))
    rows = [tall * len(summary.subjects), *(ROW * len(results) for results in groups.values())]
    title = f"{summary.experiment}, size {summary.size}, {plural(len(summary.seeds), 'seed')}"
    note = "A mark is a seed, a long bar the mean of the seeds, a line its interval over seeds."
    standings = {r.standing for r in summary.results if r.interval is not None}
    with drawing():
        chart = Chart(title, note, sum(rows) + 0.6 * len(rows))
        legend = {scheme: look_of(k) | {"ls": "none"} for k, scheme in enumerate(schemes)}
        chart.legend(
            legend
            | {
                words: {"color": colour, "lw": 2.0}
                for standing, (colour, words) in MEANINGS.items()
                if standing in standings
            }
        )
        axes, *below = chart.panels(*rows)
        rows_of(axes, summary.subjects)
        axes.set_xlabel("added loss, %")
        _errors(summary, axes, schemes, tall)
        for (what, results), axes in zip(groups.items(), below, strict=True):
            rows_of(
                axes, [f"{r.contrast.a} - {r.contrast.b}, {r.contrast.scheme}" for r in results]
            )
            axes.set_xlabel(f"difference of {what}")
            _contrasts(axes, results)
        return chart.svg("summary", title)


def _errors(summary: ExperimentSummary, axes: Axes, schemes: tuple[str, ...], tall: float) -> None:
    """Draw each model's added losses in a row: a mark for a seed, a bar at their mean."""
    errors: dict[tuple[str, str], list[float]] = {}
    for point in summary.points:
        cell = errors.setdefault((point.subject, point.scheme), [])
        cell.append(100 * point.interval.estimate)
    axes.axvline(0, color=FAINT, lw=0.7, zorder=1)
    for k, subject in enumerate(summary.subjects):
        for n, scheme in enumerate(schemes):
            x, look = errors.get((subject, scheme), []), look_of(n)
            y = k + 0.09 / tall * (n - (len(schemes) - 1) / 2)
            axes.plot(x, [y] * len(x), **(look | {"ls": "none"}))
            if x:
                axes.plot([sum(x) / len(x)], [y], "|", ms=7, mew=1.5, color=look["color"])


def _contrasts(axes: Axes, results: list[ContrastResult]) -> None:
    """Draw each contrast in a row: a mark for a seed, the interval over seeds as a line."""
    axes.axvline(0, color=FAINT, lw=0.7, zorder=1)
    for y, result in enumerate(results):
        factor = 100 if result.contrast.measure == "error" else 1
        colour, _ = MEANINGS.get(result.standing, (INK, ""))
        if (interval := result.interval) is not None:
            ends = (interval.estimate, interval.low, interval.high)
            scaled = Interval(*(factor * x for x in ends))
            (low,), (high,) = bounds([scaled])
            axes.hlines(y, low, high, color=colour, lw=1.4, zorder=3)
            axes.plot([scaled.estimate], [y], "|", ms=10, mew=1.5, color=colour)
        seeds = [factor * seed.interval.estimate for seed in result.seeds]
        axes.plot(seeds, [y] * len(seeds), "o", color=INK, ms=3.6)
