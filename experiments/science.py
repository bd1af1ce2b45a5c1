"""Write the parts of docs/science.md that repeat what experiments showed, and a page for each.

    python -m experiments.science          # the pages, from the summaries in docs/science
    python -m experiments.science OUT      # first the summaries and pictures of the runs in OUT

Each part is between two markers. An experiment without a summary is written as `-`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from experiments.contrasts import errors_of, standing
from experiments.summary import (
    STANDINGS,
    UNITS,
    expected,
    over_seeds,
    summary_to_json,
)
from experiments.table import read_experiment, shipped_experiments
from experiments.types import Claim, ExperimentSummary
from qaudit.report.document import (
    TableBlock,
    bullets,
    cell,
    code,
    columns,
    name_cell,
    row,
    words,
)
from qaudit.report.format import NOT_MEASURED, count, plural
from qaudit.report.markdown import render_blocks
from qaudit.saved.codec import decode

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "science.md"
FOLDER = ROOT / "docs" / "science"
SIZE = "cpu"


def summaries() -> dict[str, ExperimentSummary | None]:
    """Return the saved summary of every experiment that ships, or nothing."""
    paths = {name: FOLDER / f"{name}.json" for name in shipped_experiments()}
    return {name: read_summary(p) if p.is_file() else None for name, p in paths.items()}


def read_summary(path: Path) -> ExperimentSummary:
    """Read a summary from its file."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return decode(ExperimentSummary, document, "summary")


def rejudged(summary: ExperimentSummary) -> ExperimentSummary:
    """Return a saved summary with its contrasts judged as they are judged now."""
    results = tuple(
        replace(
            r,
            standing=standing(
                r.contrast, len(r.seeds), r.interval, errors_of(r.contrast, summary.points)
            ),
        )
        for r in summary.results
    )
    return replace(summary, results=results)


def overview(found: dict[str, ExperimentSummary | None]) -> str:
    """Return every claim with how many of its contrasts stand how."""
    rows = []
    for name, summary in found.items():
        experiment = read_experiment(name)
        for claim in experiment.claims:
            contrasts = [c for c in experiment.contrasts if c.claim == claim.name]
            asked = sum(len(c.schemes) for c in contrasts)
            counts = {"not measured": asked} if summary is None else _counts(summary, claim.name)
            numbers = [str(counts.get(key, 0)) if summary else NOT_MEASURED for key in STANDINGS]
            rows.append(row(claim.says, name_cell(name), str(asked), *numbers[:5]))
    counted = ("contrasts", "agree", "disagree", "inconclusive", "open", "too wide")
    names = columns("claim", "experiment", *counted)
    return render_blocks([TableBlock(names, tuple(rows))])


def _counts(summary: ExperimentSummary, claim: str) -> Counter[str]:
    return Counter(r.standing for r in summary.results if r.contrast.claim == claim)


def block(name: str, summary: ExperimentSummary | None) -> str:
    """Write what the overview shows of an experiment, or that it was not run."""
    if summary is None:
        return "Not run."
    size = f"{count(summary.tokens)} tokens for each of {plural(len(summary.seeds), 'seed')}"
    return (
        f"![{summary.description}](science/{name}.svg)\n\n"
        f"[Every contrast](science/{name}.md), {size}."
    )


def page(name: str, summary: ExperimentSummary) -> str:
    """Write every contrast of an experiment, by claim."""
    parts = [f"# The experiment `{name}`", summary.description]
    parts += ["Methods, marks and units are those of [the overview](../science.md#methods)."]
    for claim in summary.claims:
        parts += [f"## {claim.says}", f"{claim.source}."]
        parts += [render_blocks([compact(summary, claim)])]
    parts += [render_blocks([bullets(*summary.notes)])] if summary.notes else []
    return "\n\n".join(parts) + "\n"


MARKS = {"agrees": " ✓", "disagrees": " ✗", "too wide": " (margin exceeds it)"}


def compact(summary: ExperimentSummary, claim: Claim) -> TableBlock:
    """Lay a claim's contrasts out by scheme: the interval over seeds, and how it stands."""
    results = [r for r in summary.results if r.contrast.claim == claim.name]
    schemes = tuple(dict.fromkeys(r.contrast.scheme for r in results))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for r in results:
        c = r.contrast
        heads = (c.says, c.a, c.b, UNITS[c.measure], expected(c))
        cells = rows.setdefault(heads, {})
        cells[c.scheme] = over_seeds(r) + MARKS.get(r.standing, "")
    lines = [
        row(
            cell((*words(f"{says}: "), *code(a), *words(" - "), *code(b), *words(f", {unit}"))),
            expectation,
            *(cells.get(scheme, "") for scheme in schemes),
        )
        for (says, a, b, unit, expectation), cells in rows.items()
    ]
    return TableBlock(columns("contrast", "expected", *schemes), tuple(lines))


def rendered(text: str) -> str:
    """Return the page's text with all parts brought up to date."""
    found = summaries()
    parts = {"science": overview(found)}
    parts |= {f"science:{name}": block(name, summary) for name, summary in found.items()}
    for name, part in parts.items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        assert end, f"docs/science.md lacks the markers of `{name}`"
        text = f"{before}{start}\n{part}\n\n{end}{after}"
    return text


def take(out: Path) -> None:
    """Sum up what was measured in a folder of experiments, and keep it with its pictures."""
    from experiments.seeds import LabRequest, sum_up
    from experiments.summary import svg_of

    for name in shipped_experiments():
        audits = (out / f"{name}-{SIZE}").glob("seed-*/audit.json")
        seeds = [int(path.parent.name.removeprefix("seed-")) for path in audits]
        if not seeds:
            continue
        request = LabRequest(SIZE, max(seeds), out, compiled=True)
        summary = sum_up(request, read_experiment(name))
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.json").write_text(summary_to_json(summary), encoding="utf-8")
        (FOLDER / f"{name}.svg").write_text(svg_of(summary), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        take(Path(sys.argv[1]))
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for name, summary in summaries().items():
        if summary is not None:
            (FOLDER / f"{name}.md").write_text(page(name, summary), encoding="utf-8")
