"""Write the parts of docs/science.md that repeat what experiments showed, and every contrast.

    python -m experiments.science          # the pages, from the summaries in docs/science
    python -m experiments.science OUT      # first the summaries and pictures of the runs in OUT

Each part is between two markers. An experiment without a summary is written as `-`. Contrasts that
expect a direction are tested over seeds by Student's t; of all of them together, those are counted
that hold at a false discovery rate of 5 % (Benjamini and Hochberg) and after Holm's correction.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from experiments.contrasts import errors_of, standing
from experiments.summary import STANDINGS, summary_to_json
from experiments.table import Contrast, ExperimentSummary, read_experiment, shipped_experiments
from qaudit.report.document import Cells, name_cell, table
from qaudit.report.format import NOT_MEASURED, count, plural
from qaudit.report.markdown import render_blocks
from qaudit.saved.codec import decode

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "science.md"
FOLDER = ROOT / "docs" / "science"
SIZE = "cpu"
ALPHA = 0.05


def summaries() -> dict[str, ExperimentSummary | None]:
    """Return the saved summary of every experiment that ships, or nothing."""
    paths = {name: FOLDER / f"{name}.json" for name in shipped_experiments()}
    return {name: read_summary(p) if p.is_file() else None for name, p in paths.items()}


def read_summary(path: Path) -> ExperimentSummary:
    return decode(ExperimentSummary, json.loads(path.read_text(encoding="utf-8")), "summary")


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


@dataclass(frozen=True)
class Corrected:
    """The p value of each contrast that expects a direction, and what holds among all of them."""

    p: dict[tuple[str, Contrast], float]

    @classmethod
    def of(cls, found: Mapping[str, ExperimentSummary | None]) -> Corrected:
        from scipy.stats import ttest_1samp

        directional = {
            (name, r.contrast): float(
                ttest_1samp([one.interval.estimate for one in r.seeds], 0.0).pvalue
            )
            for name, summary in found.items()
            for r in (summary.results if summary else ())
            if r.contrast.expect in ("lower", "higher")
        }
        return cls(directional)

    def discovered(self) -> set[tuple[str, Contrast]]:
        """Return what holds at a false discovery rate of 5 % (Benjamini and Hochberg)."""
        ordered = sorted(self.p, key=lambda key: self.p[key])
        ranks = [k for k, key in enumerate(ordered, 1) if self.p[key] <= ALPHA * k / len(ordered)]
        return set(ordered[: max(ranks, default=0)])

    def certain(self) -> set[tuple[str, Contrast]]:
        """Return what holds where one false mark among all is to be rarer than 5 % (Holm)."""
        ordered = sorted(self.p, key=lambda key: self.p[key])
        steps = (self.p[key] <= ALPHA / (len(ordered) - k) for k, key in enumerate(ordered))
        return set(ordered[: sum(takewhile(bool, steps))])


def correction(found: Mapping[str, ExperimentSummary | None]) -> str:
    """Return the sentence about what is left of the marks once all contrasts are counted."""
    corrected = Corrected.of(found)
    marked = sum(
        (name, r.contrast) in corrected.p and r.standing in ("agrees", "disagrees")
        for name, summary in found.items()
        for r in (summary.results if summary else ())
    )
    return (
        f"Of {len(corrected.p)} contrasts that expect a direction {marked} are marked, one by one. "
        f"{len(corrected.discovered())} hold at a false discovery rate of 5 % (Benjamini and "
        f"Hochberg), {len(corrected.certain())} after Holm's correction.\n"
    )


def overview(found: dict[str, ExperimentSummary | None]) -> str:
    """Return every claim with how many of its contrasts stand how."""
    rows: list[Cells] = []
    holding = Counter((name, contrast.claim) for name, contrast in Corrected.of(found).discovered())
    for name, summary in found.items():
        experiment = read_experiment(name)
        for claim in experiment.claims:
            contrasts = [c for c in experiment.contrasts if c.claim == claim.name]
            asked = sum(len(c.schemes) for c in contrasts)
            results = summary.results if summary else ()
            mine = [r for r in results if r.contrast.claim == claim.name]
            counts: Counter[str] = Counter(r.standing for r in mine)
            numbers = [str(counts.get(key, 0)) if summary else NOT_MEASURED for key in STANDINGS]
            hold = str(holding[name, claim.name]) if summary else NOT_MEASURED
            rows.append((claim.says, name_cell(name), str(asked), *numbers[:5], hold))
    counted = ("contrasts", "agree", "disagree", "inconclusive", "open", "too wide", "hold at 5 %")
    return render_blocks([table(("claim", "experiment", *counted), rows)])


def block(name: str, summary: ExperimentSummary | None) -> str:
    """Write what the overview shows of an experiment, or that it was not run."""
    if summary is None:
        return "Not run."
    size = f"{count(summary.tokens)} tokens for each of {plural(len(summary.seeds), 'seed')}"
    return (
        f"![{summary.description}](science/{name}.svg)\n\n"
        f"[Every contrast](science/contrasts.csv), {size}."
    )


COLUMNS = (
    "experiment", "claim", "contrast", "a", "b", "measure", "scheme", "expected", "mean", "low",
    "high", "stands", "p", "holds at 5 %",
)  # fmt: skip


def contrasts(found: Mapping[str, ExperimentSummary | None]) -> str:
    """Return every contrast as CSV: the interval over seeds, how it stands, and its p value."""
    corrected = Corrected.of(found)
    holding = corrected.discovered()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, summary in found.items():
        for r in summary.results if summary else ():
            c, i = r.contrast, r.interval
            p = corrected.p.get((name, c))
            interval = ("", "", "") if i is None else (i.estimate, i.low, i.high)
            numbers = [f"{value:.4g}" if value != "" else "" for value in interval]
            tested = ("", "") if p is None else (f"{p:.3g}", (name, c) in holding)
            about = (c.claim, c.says, c.a, c.b, c.measure, c.scheme, c.expect or "")
            writer.writerow((name, *about, *numbers, r.standing, *tested))
    return text.getvalue()


def rendered(text: str) -> str:
    """Return the page's text with all parts brought up to date."""
    found = summaries()
    parts = {"science": f"{correction(found)}\n{overview(found)}"}
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
    (FOLDER / "contrasts.csv").write_text(contrasts(summaries()), encoding="utf-8")
