"""What an experiment showed, as JSON and as Markdown: each claim, contrasts, all seeds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from qaudit.errors import AuditError
from qaudit.report.figures.experiment import experiment
from qaudit.report.figures.svg import document
from qaudit.report.format import NOT_MEASURED, count, listing, percent, plural, spread
from qaudit.report.markdown import cell, plain, prose
from qaudit.saved.codec import decode, text_of
from qaudit.types import Claim, Contrast, ContrastResult, ExperimentSummary, Interval
from qaudit.whole import write_whole

SCHEMA = "1"
AGAIN = "run the same experiment again: what is trained and measured is kept"
STANDINGS = {
    "agrees": "agrees",
    "disagrees": "**disagrees**",
    "inconclusive": "inconclusive",
    "open": "nothing expected",
    "not measured": NOT_MEASURED,
}
EXPECTED = {"higher": "> 0", "lower": "< 0", None: ""}


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


def read_summary(path: Path) -> ExperimentSummary:
    """Read a summary from its file."""
    try:
        return summary_from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise AuditError(f"`{path}` cannot be read: {error}", hint=AGAIN) from error


def summary_from_json(text: str) -> ExperimentSummary:
    """Read a summary of this version."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AuditError(f"the summary is not whole JSON: {error}", hint=AGAIN) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise AuditError("this is no summary of an experiment that can be read here", hint=AGAIN)
    return decode(ExperimentSummary, document, "summary")


# ------------------------------------------------------------------------------------ Markdown


def render_summary(summary: ExperimentSummary) -> str:
    """Render a summary: the question, and each claim with its measurements."""
    parts = [f"# {plain(summary.experiment)}, size {plain(summary.size)}", described(summary)]
    for claim in summary.claims:
        parts.append(f"## {plain(claim.says)}\n\n{plain(claim.source)}")
        parts.append(table(summary, claim))
    parts += [f"- {prose(note)}" for note in summary.notes]
    return "\n\n".join(parts) + "\n"


def described(summary: ExperimentSummary) -> str:
    """Say what was trained and measured, and on how many seeds."""
    seeds = plural(len(summary.seeds), "seed")
    lines = [
        f"{prose(summary.description)} {count(summary.parameters)} parameters, "
        f"{count(summary.tokens)} tokens trained on for each of {seeds}, "
        f"{plural(summary.documents, 'evaluation document')}.",
        f"Intervals at {100 * summary.confidence:g} %: of a seed over documents, paired; over "
        "seeds by Student's t on one number per seed.",
    ]
    if len(summary.seeds) < 2:
        lines.append(
            "One seed tells of one pair of models and not of training: nothing is claimed."
        )
    elif len(summary.seeds) < 6:
        lines.append(
            f"With {seeds} that interval is wide, and an effect has to be large against the "
            "spread of seeds to be seen."
        )
    return " ".join(lines)


def table(summary: ExperimentSummary, claim: Claim) -> str:
    """Render the contrasts of a claim, one row for each scheme."""
    rows = [_row(summary, r) for r in summary.results if r.contrast.claim == claim.name]
    names = [f"seed {seed}" for seed in summary.seeds]
    headers = ["contrast", "scheme", "expected", *names, "over seeds", ""]
    return str(tabulate(rows, headers, tablefmt="pipe", disable_numparse=True))


def _row(summary: ExperimentSummary, result: ContrastResult) -> list[str]:
    contrast = result.contrast
    found = {one.seed: one.interval for one in result.seeds}
    names = f"{cell(contrast.a)} minus {cell(contrast.b)}"
    return [
        f"{plain(contrast.says)}: {names}, {UNITS[contrast.measure]}",
        plain(contrast.scheme),
        _expected(contrast),
        *(_shown(contrast, found.get(seed)) for seed in summary.seeds),
        _shown(contrast, result.interval),
        STANDINGS[result.standing],
    ]


UNITS = {"error": "% points", "lost": "nats lost", "loss": "nats"}


def _expected(contrast: Contrast) -> str:
    if contrast.expect != "near":
        return EXPECTED[contrast.expect]
    size = 100 * contrast.margin if contrast.measure == "error" else contrast.margin
    return f"within {size:g}"


def _shown(contrast: Contrast, found: Interval | None) -> str:
    if found is None:
        return NOT_MEASURED
    return percent(found) if contrast.measure == "error" else spread(found)


def stands(summary: ExperimentSummary, claim: Claim) -> str:
    """Say in a sentence how a claim fared."""
    results = [r for r in summary.results if r.contrast.claim == claim.name]
    counts: dict[str, int] = {}
    for result in results:
        counts[result.standing] = counts.get(result.standing, 0) + 1
    words = {
        "agrees": "as expected",
        "disagrees": "against it",
        "inconclusive": "inconclusive",
        "open": "without an expectation",
        "not measured": "not measured",
    }
    told = [f"{counts[name]} {word}" for name, word in words.items() if name in counts]
    return f"Of {plural(len(results), 'contrast')}: {listing(told)}." if told else ""
