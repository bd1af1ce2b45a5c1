"""What an experiment showed, as JSON and as Markdown: each claim, contrasts, all seeds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from qaudit.report import document as doc
from qaudit.report.figures.experiment import experiment
from qaudit.report.figures.svg import document
from qaudit.report.format import NOT_MEASURED, count, percent, plural, shown, spread
from qaudit.report.markdown import render_blocks
from qaudit.saved.codec import text_of
from qaudit.types import Claim, Contrast, ContrastResult, ExperimentSummary, Interval
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
UNITS = {"error": "% points", "lost": "nats lost", "loss": "nats"}


def summary_to_json(summary: ExperimentSummary) -> str:
    """Write a summary."""
    return text_of({"schema": SCHEMA, **asdict(summary)})


def write_summary(summary: ExperimentSummary, folder: Path) -> None:
    """Write a summary as JSON, as Markdown and as a picture; a file is replaced whole."""
    texts = {"summary.json": summary_to_json(summary), "summary.md": render_summary(summary)}
    if summary.points:
        texts["summary.svg"] = document(experiment(summary))
    for name, text in texts.items():
        write_whole(folder / name, text)


def render_summary(summary: ExperimentSummary) -> str:
    """Render a summary as Markdown: the question, and each claim with its measurements."""
    blocks: list[doc.Block] = [description(summary)]
    for claim in summary.claims:
        source = doc.paragraph(doc.words(claim.source))
        blocks.append(doc.Section(claim.says, (source, table(summary, claim))))
    blocks += [doc.bullets(*summary.notes)] if summary.notes else []
    title = f"{summary.experiment}, size {summary.size}"
    return f"{render_blocks([doc.Section(title, tuple(blocks))], level=1)}\n"


def description(summary: ExperimentSummary) -> doc.Paragraph:
    """Return what was trained and measured, and on how many seeds."""
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


def table(summary: ExperimentSummary, claim: Claim) -> doc.Table:
    """Return the contrasts of a claim, one row for each scheme."""
    seeds = [f"seed {seed}" for seed in summary.seeds]
    rows = [_row(summary, r) for r in summary.results if r.contrast.claim == claim.name]
    names = doc.columns("contrast", "scheme", "expected", *seeds, "over seeds", "")
    return doc.Table(names, tuple(rows))


def _row(summary: ExperimentSummary, result: ContrastResult) -> doc.Row:
    contrast = result.contrast
    intervals = {seed.seed: seed.interval for seed in result.seeds}
    models = (*doc.code(contrast.a), *doc.words(" minus "), *doc.code(contrast.b))
    return doc.row(
        doc.cell(
            (*doc.words(f"{contrast.says}: "), *models, *doc.words(f", {UNITS[contrast.measure]}"))
        ),
        contrast.scheme,
        _expected(contrast),
        *(_shown(contrast, intervals.get(seed)) for seed in summary.seeds),
        _shown(contrast, result.interval),
        doc.cell(_standing(result)),
    )


def _standing(result: ContrastResult) -> doc.Inline:
    shown = doc.words(STANDINGS[result.standing])
    return doc.strong(shown) if result.standing == "disagrees" else shown


def _expected(contrast: Contrast) -> str:
    if contrast.expect != "near":
        return EXPECTED[contrast.expect]
    size = 100 * contrast.margin if contrast.measure == "error" else contrast.margin
    return f"within {size:g}"


def _shown(contrast: Contrast, interval: Interval | None) -> str:
    return shown(interval, percent if contrast.measure == "error" else spread)
