"""docs/science.md says what the saved summaries say, and they are of the experiments that ship."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scipy.stats import false_discovery_control

from experiments.science import (
    FOLDER,
    PAGE,
    Corrected,
    contrasts,
    overview,
    read_summary,
    rejudged,
    rendered,
    summaries,
)
from experiments.summary import summary_to_json
from experiments.table import read_experiment, shipped_experiments

FOUND = {name: summary for name, summary in summaries().items() if summary is not None}


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert rendered(text) == text, "run `python -m experiments.science`"


def test_the_table_of_contrasts_is_up_to_date() -> None:
    assert (FOLDER / "contrasts.csv").read_text("utf-8") == contrasts(summaries())


def test_corrections_are_those_of_scipy_and_of_holms_definition() -> None:
    corrected = Corrected.of(summaries())
    names = list(corrected.p)
    assert len(names) > 50
    adjusted = false_discovery_control([corrected.p[name] for name in names])
    kept = {name for name, p in zip(names, adjusted, strict=True) if p <= 0.05}
    assert corrected.discovered() == kept
    smallest = min(names, key=lambda name: corrected.p[name])
    assert corrected.certain() <= kept
    assert (smallest in corrected.certain()) == (corrected.p[smallest] <= 0.05 / len(names))


def test_nothing_is_kept_of_an_experiment_that_does_not_ship() -> None:
    if FOLDER.is_dir():
        assert {path.stem for path in FOLDER.iterdir()} <= {*shipped_experiments(), "contrasts"}


@pytest.mark.parametrize("name", FOUND)
def test_a_kept_summary_is_of_the_experiment_as_it_ships(name: str) -> None:
    contrasts = read_experiment(name).contrasts_by_scheme()
    assert tuple(result.contrast for result in FOUND[name].results) == contrasts
    assert FOUND[name].subjects
    assert (FOLDER / f"{name}.svg").is_file()


@pytest.mark.parametrize("name", FOUND)
def test_a_kept_summary_is_judged_as_today(name: str) -> None:
    assert rejudged(FOUND[name]) == FOUND[name]


def test_no_contrast_is_counted_in_two_experiments() -> None:
    pairs = [
        (c.a, c.b, c.scheme, c.measure) for found in FOUND.values() for c in
        (r.contrast for r in found.results)
    ]  # fmt: skip
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("name", FOUND)
def test_a_kept_summary_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(summary_to_json(FOUND[name]), encoding="utf-8")
    assert read_summary(tmp_path / "summary.json") == FOUND[name]


def test_what_was_not_run_stands_as_a_dash() -> None:
    rows = overview(dict.fromkeys(shipped_experiments())).splitlines()[2:]
    assert len(rows) > 10
    assert all(re.search(r"(\| -\s+){5}\|$", row) for row in rows)
