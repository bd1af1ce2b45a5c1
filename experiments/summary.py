"""What an experiment showed, as JSON, Markdown and a picture: claims, contrasts, all seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.types import Claim, Contrast, ContrastResult, ExperimentSummary
from qaudit.report import document as doc
from qaudit.report.figures import frame
from qaudit.report.figures.drawing import Drawing, Label, Part, Swatch, line
from qaudit.report.figures.frame import Scale, linear
from qaudit.report.figures.style import look_of, name
from qaudit.report.figures.svg import document
from qaudit.report.format import NOT_MEASURED, count, percent, plural, shown, spread
from qaudit.report.markdown import render_blocks
from qaudit.saved.codec import text_of
from qaudit.types import Interval
from qaudit.whole import write_whole

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
        texts["summary.svg"] = document(drawing_of(summary))
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
    seeds = [f"seed {seed}" for seed in summary.seeds]
    rows = [_row(summary, r) for r in summary.results if r.contrast.claim == claim.name]
    names = doc.columns("contrast", "scheme", "expected", *seeds, "over seeds", "")
    return doc.TableBlock(names, tuple(rows))


def _row(summary: ExperimentSummary, result: ContrastResult) -> doc.TableRow:
    contrast = result.contrast
    intervals = {seed.seed: seed.interval for seed in result.seeds}
    models = (*doc.code(contrast.a), *doc.words(" minus "), *doc.code(contrast.b))
    return doc.row(
        doc.cell(
            (*doc.words(f"{contrast.says}: "), *models, *doc.words(f", {UNITS[contrast.measure]}"))
        ),
        contrast.scheme,
        expected(contrast),
        *(_shown(contrast, intervals.get(seed)) for seed in summary.seeds),
        over_seeds(result),
        doc.cell(_standing(result)),
    )


def _standing(result: ContrastResult) -> doc.Inline:
    shown = doc.words(STANDINGS[result.standing])
    return doc.strong(shown) if result.standing == "disagrees" else shown


def expected(contrast: Contrast) -> str:
    if contrast.expect != "near":
        return EXPECTED[contrast.expect]
    size = 100 * contrast.margin if contrast.measure == "error" else contrast.margin
    return f"within {size:g}"


def over_seeds(result: ContrastResult) -> str:
    return _shown(result.contrast, result.interval)


def _shown(contrast: Contrast, interval: Interval | None) -> str:
    return shown(interval, percent if contrast.measure == "error" else spread)


LEFT, RIGHT, ROW, GAP = 250.0, 840.0, 20.0, 58.0
PANELS = {  # measures that share an axis, and its name
    ("error",): "added losses, % points",
    ("lost", "loss"): "losses, nats per token",
    ("kl",): "KL from full precision, nats per token",
    ("trace",): "logarithms of the Hessian's trace",
}
MEANINGS = {  # colour, words
    "agrees": ("c2", "as expected"),
    "disagrees": ("c1", "against expectation"),
    "inconclusive": ("faint", "inconclusive"),
    "open": ("c0", "nothing expected"),
    "too wide": ("faint", "margin exceeds the errors"),
}


def drawing_of(summary: ExperimentSummary) -> Drawing:
    """Draw the errors of all models above, the contrasts in percentage points or nats below.

    Models are in the order of the experiment's file, which is no order in time: no line joins them.
    """
    schemes = tuple(dict.fromkeys(point.scheme for point in summary.points))
    parts, y = _errors(summary, schemes, 24.0)
    for measures in PANELS:
        group = [r for r in summary.results if r.seeds and r.contrast.measure in measures]
        if group:
            panel, y = _contrasts(group, y + GAP)
            parts += panel
    title = f"{summary.experiment}, size {summary.size}, {plural(len(summary.seeds), 'seed')}"
    standings = {r.standing for r in summary.results if r.interval is not None}
    legend = [
        Swatch(name(scheme), look_of(k).marker, f"mark {look_of(k).colour}")
        for k, scheme in enumerate(schemes)
    ]
    legend += [
        Swatch(f"over seeds: {words}", line=f"whisker bold {colour}")
        for standing, (colour, words) in MEANINGS.items()
        if standing in standings
    ]
    note = "A mark is a seed, a long bar the mean of the seeds, a line its interval over seeds."
    return Drawing("summary", title, title, tuple(parts), y + 44, note, tuple(legend))


def _errors(
    summary: ExperimentSummary, schemes: tuple[str, ...], top: float
) -> tuple[list[Part], float]:
    """Draw each model's added losses in a row: a mark for a seed, a bar at their mean."""
    errors = {
        (point.subject, point.scheme): [
            100 * p.interval.estimate
            for p in summary.points
            if (p.subject, p.scheme) == (point.subject, point.scheme)
        ]
        for point in summary.points
    }
    tall = max(ROW, 9.0 * len(schemes))
    bottom = top + tall * len(summary.subjects)
    values = [x for values in errors.values() for x in values]
    parts, across = _panel([0.0, *values], top, bottom, "added loss, %")
    for k, subject in enumerate(summary.subjects):
        middle = top + tall * (k + 0.5)
        parts.append(_name(subject, middle))
        for n, scheme in enumerate(schemes):
            look = look_of(n)
            errors_of_cell = errors.get((subject, scheme), [])
            y = middle + 8 * (n - (len(schemes) - 1) / 2)
            parts += (
                [_bar(across.at(sum(errors_of_cell) / len(errors_of_cell)), y, 5, look.colour)]
                if errors_of_cell
                else []
            )
            parts += [frame.mark(look.marker, across.at(x), y, look.colour) for x in errors_of_cell]
    return parts, bottom


def _contrasts(results: list[ContrastResult], top: float) -> tuple[list[Part], float]:
    """Draw each contrast in a row: a mark for a seed, the interval over seeds as a line."""
    measure = results[0].contrast.measure
    factor = 100 if measure == "error" else 1
    bottom = top + ROW * len(results)
    intervals = [seed.interval for result in results for seed in result.seeds]
    intervals += [result.interval for result in results if result.interval is not None]
    ends = [factor * x for i in intervals for x in (i.low, i.estimate, i.high)]
    (what,) = (words for measures, words in PANELS.items() if measure in measures)
    parts, across = _panel([0.0, *ends], top, bottom, f"difference of {what}")
    for k, result in enumerate(results):
        y, contrast = top + ROW * (k + 0.5), result.contrast
        colour, _ = MEANINGS.get(result.standing, ("ink", ""))
        parts.append(_name(f"{contrast.a} - {contrast.b}, {contrast.scheme}", y))
        if (interval := result.interval) is not None:
            low, middle, high = (
                across.at(factor * x) for x in (interval.low, interval.estimate, interval.high)
            )
            parts += [line(low, y, high, y, f"whisker bold {colour}"), _bar(middle, y, 7, colour)]
        seeds = [across.at(factor * seed.interval.estimate) for seed in result.seeds]
        parts += [frame.mark("o", x, y, "ink") for x in seeds]
    return parts, bottom


def _panel(
    values: Sequence[float], top: float, bottom: float, unit: str
) -> tuple[list[Part], Scale]:
    across = linear(values, LEFT, RIGHT, 6)
    below = frame.axis_below(across, bottom, name=unit)
    return [*frame.lines_up(across, top, bottom), *below], across


def _name(text: str, y: float) -> Label:
    return Label(name(text, 36), LEFT - 10, y + 4, "end")


def _bar(x: float, y: float, half: float, colour: str) -> Part:
    return line(x, y - half, x, y + half, f"whisker bold {colour}")
