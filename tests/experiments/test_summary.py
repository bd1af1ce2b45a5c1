"""A summary of an experiment: as JSON and back, as Markdown, as a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.science import read_summary
from experiments.summary import render_summary, write_summary
from experiments.types import (
    Claim,
    Contrast,
    ContrastResult,
    ExperimentSummary,
    SeedEstimate,
    SeedPoint,
)
from qaudit.types import Interval

CLAIM = Claim("c", "somebody, figure 1", "Decay hurts.")
LOSS = Contrast("c", "at the end", "cool@2", "held@2", "loss", "fp")
ERROR = Contrast("c", "at the end", "cool@2", "held@2", "error", "rtn-3bit", "higher")


def result(contrast: Contrast, *values: float) -> ContrastResult:
    seeds = [SeedEstimate(k, Interval(v, v - 0.01, v + 0.01)) for k, v in enumerate(values, 1)]
    mean = sum(values) / len(values) if values else 0.0
    whole = Interval(mean, mean - 0.02, mean + 0.02) if len(values) > 1 else None
    return ContrastResult(contrast, tuple(seeds), whole, "agrees" if values else "not measured")


SUMMARY = ExperimentSummary(
    experiment="cooled",
    size="cpu",
    description="A held rate against a straight line.",
    command="python -m experiments run cooled --size cpu --seeds 2",
    seeds=(1, 2),
    parameters=1_050_496,
    tokens=5_000_000,
    documents=100,
    confidence=0.95,
    subjects=("held@2", "cool@2"),
    claims=(CLAIM,),
    results=(
        result(ERROR, 0.03, 0.05),
        result(replace(ERROR, scheme="gptq-3bit")),
        result(LOSS, 0.1, 0.3),
    ),
    points=tuple(
        SeedPoint(seed, subject, "rtn-3bit", 3.0, 3.1, Interval(0.03, 0.02, 0.04))
        for seed in (1, 2)
        for subject in ("held@2", "cool@2")
    ),
    environment={"python": "3.11"},
)


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_summary(SUMMARY, tmp_path / "new")
    assert read_summary(tmp_path / "new" / "summary.json") == SUMMARY
    found = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert found == ["summary.json", "summary.md", "summary.svg"]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| at the end")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_errors_are_points_losses_are_nats_and_what_is_missing_is_a_dash() -> None:
    error, missing, loss = rows(render_summary(SUMMARY))
    assert error[1:] == [
        "rtn-3bit",
        "> 0",
        "3.0 [2.0, 4.0]",
        "5.0 [4.0, 6.0]",
        "4.0 [2.0, 6.0]",
        "agrees",
    ]
    assert missing[3:] == ["-", "-", "-", "-"]
    assert loss[0].endswith("nats")
    assert loss[3] == "0.100 [0.090, 0.110]"


def test_one_seed_claims_nothing() -> None:
    one = replace(SUMMARY, seeds=(1,), results=(result(ERROR, 0.03),))
    assert "nothing is claimed" in render_summary(one)
    assert rows(render_summary(one))[0][4] == "-"


def test_names_of_others_stay_names() -> None:
    odd = Claim("c", "<b>x</b>", "a | b\n# c")
    text = render_summary(replace(SUMMARY, claims=(odd,), description="<script> *x*"))
    assert "<b>" not in text
    assert "<script>" not in text
    assert "\n# c" not in text


def test_the_same_summary_makes_the_same_picture(tmp_path: Path) -> None:
    write_summary(SUMMARY, tmp_path / "a")
    write_summary(SUMMARY, tmp_path / "b")
    first = (tmp_path / "a" / "summary.svg").read_bytes()
    assert first == (tmp_path / "b" / "summary.svg").read_bytes()
    write_summary(replace(SUMMARY, results=SUMMARY.results[:1]), tmp_path / "b")
    assert first != (tmp_path / "b" / "summary.svg").read_bytes()
