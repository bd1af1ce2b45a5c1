"""A plan as people read it: aligned, in 80 columns, with what is not known left out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.registry import parse_scheme
from qaudit.report.plan import render_plan
from qaudit.types import (
    Checkpoint,
    Finding,
    Plan,
    PresetTime,
    Ref,
    Subject,
    Traffic,
    WeightFile,
)
from tests.support import sample

GB = 10**9


def plan(**changes: Any) -> Plan:
    return replace(sample.audit().plan, **changes)


def row(text: str, word: str) -> str:
    """Return what stands behind a word, put back into one line."""
    (only,) = rows(text, word)
    return only


def rows(text: str, word: str) -> list[str]:
    """Return what stands behind each line that begins with a word."""
    whole = re.sub(r"\n +", " ", text).splitlines()
    return [line.removeprefix(word).strip() for line in whole if line.startswith(f"{word} ")]


def test_a_plan_is_aligned_and_keeps_to_80_columns() -> None:
    finding = Finding("QA009", "warn", "soup", None, "two names for " * 12, "leave one out")
    text = render_plan(plan(findings=(finding,), notes=("a long story " * 20,)))
    assert max(map(len, text.splitlines())) <= 80
    assert all(line[8] == " " and line[9] != " " for line in text.splitlines())


def test_a_local_plan_says_nothing_of_the_hub() -> None:
    text = render_plan(plan())
    assert "fetch" not in text
    assert "disk" not in text
    assert row(text, "plan").startswith("14 checkpoints and 1 soup, 8 schemes and full precision")
    assert row(text, "time") == "40 s to 2 min"
    assert row(text, "model") == "1.18M parameters, 4 blocks, float32 on cpu, context 256"


def test_fetching_is_priced_in_bytes_and_at_a_rate_that_is_named() -> None:
    text = render_plan(plan(traffic=Traffic(350 * GB, 2 * GB, 61 * GB, 212 * GB, 100 * GB)))
    assert row(text, "fetch") == "350.0 GB: 47 min at 1 Gbit/s; 2.0 GB more are in the cache"
    assert row(text, "disk") == "at most 61.0 GB at a time, 100.0 GB allowed, 212.0 GB free"
    assert row(text, "time") == "40 s to 2 min to compute; downloads run at the same time"


def test_a_plan_for_a_gpu_counts_its_hours() -> None:
    text = render_plan(plan(device="cuda", seconds_low=1800.0, seconds_high=7200.0))
    assert row(text, "time") == "30 min to 2.0 h, 0.5 to 2 GPU hours"


PRESETS = (PresetTime("quick", 120.0, 480.0), PresetTime("thorough", 36000.0, 144000.0))


def test_a_plan_says_what_presets_would_take() -> None:
    short = row(render_plan(plan(presets=PRESETS)), "time")
    assert short == "40 s to 2 min; with --quick 2 min to 8 min; with --thorough 10.0 h to 40.0 h"


def test_a_long_plan_on_a_cpu_names_the_quick_one_first() -> None:
    hours = {"presets": PRESETS, "seconds_low": 7200.0, "seconds_high": 28800.0}
    assert row(render_plan(plan(**hours)), "time") == (
        "with --quick 2 min to 8 min; as planned 2.0 h to 8.0 h; with --thorough 10.0 h to 40.0 h"
    )
    on_gpu = row(render_plan(plan(**hours, device="cuda")), "time")
    assert on_gpu.startswith("2.0 h to 8.0 h, 2 to 8 GPU hours; with --quick 2 min")


def test_what_is_here_already_is_not_fetched() -> None:
    text = render_plan(plan(traffic=Traffic(0, 61 * GB, 0, 212 * GB, 100 * GB)))
    assert row(text, "fetch") == "nothing: 61.0 GB are in the cache"


def test_what_is_measured_is_named_and_a_long_series_folded() -> None:
    assert row(render_plan(plan()), "measure") == (
        "stage1-step500, stage1-step1000, stage1-step1750, stage1-step2500, stage1-step3250, "
        "stage1-step4000, 3 more, stage2-ingredient1-step500, stage2-ingredient1-step750, "
        "stage2-ingredient1-step1000, stage2-ingredient2-step1000, stage2-ingredient3-step1000, "
        "soup"
    )
    few = plan(subjects=sample.series()[:2])
    assert row(render_plan(few), "measure") == "stage1-step500, stage1-step1000"


def test_a_reference_is_named_beside_what_is_measured() -> None:
    recipe = replace(sample.audit().plan.recipe, reference="stage1-step500")
    text = render_plan(plan(recipe=recipe))
    assert row(text, "against") == "each its full precision, and all of them stage1-step500"
    assert not rows(render_plan(plan()), "against")


def test_what_the_text_can_detect_is_a_dash_until_something_is_measured() -> None:
    recipe = replace(sample.audit().plan.recipe, document_tokens=100)
    assert row(render_plan(plan(recipe=recipe)), "detect") == (
        "not known before the first measurement, on at most 64 documents and 6,400 tokens"
    )
    known = row(render_plan(plan(recipe=recipe, detectable_relative_error=0.00123)), "detect")
    assert known.startswith(
        "an added loss of 0.12 % or more, in four of five cases, on at most 64 documents"
    )


def test_the_change_of_accuracy_that_items_find_is_given_by_the_share_of_flips() -> None:
    items = (("arc_easy", 500), ("piqa", 500))
    (usual,) = rows(render_plan(plan(items=items)), "detect")[1:]
    # Of n items f flip: 2.8 = 1.96 + 0.84 standard errors sqrt(f / n); two equal tasks, sqrt(2).
    assert usual == (
        "a change of mean accuracy over tasks of 1.3 points, of a task of 500 items 1.8, where 2 % "
        "of answers flip; 2.8 points, of a task of 500 items 4, where 10 % of answers flip; in "
        "four of five cases"
    )
    (known,) = rows(render_plan(plan(items=items[:1], flips=0.05)), "detect")[1:]
    assert known == (
        "a change of accuracy of 2.8 points, where 5 % of answers flip, as measured before; "
        "in four of five cases"
    )


def test_texts_findings_and_notes_are_said() -> None:
    recipe = replace(sample.audit().plan.recipe, evaluation="hf://datasets/a/b/c.txt")
    finding = Finding("QA009", "warn", "soup", None, "`a` and `b` are the same", "take one")
    text = render_plan(plan(recipe=recipe, findings=(finding,), notes=("16 of 965",)))
    assert row(text, "text") == "evaluation: hf://datasets/a/b/c.txt"
    assert row(text, "finding") == "QA009 a and b are the same (take one)"
    assert "16 of 965" in rows(text, "note")


@pytest.mark.parametrize("kind", ["soup", "checkpoint"])
def test_only_what_there_is_is_counted(kind: str) -> None:
    subjects = [s for s in sample.series() if s.kind == kind]
    text = row(render_plan(plan(subjects=tuple(subjects[:1]))), "plan")
    assert text.startswith(f"1 {kind}, 8 schemes")


@given(st.text(), st.text())
def test_no_name_moves_the_cursor(label: str, note: str) -> None:
    first = sample.series()[0]
    text = render_plan(plan(subjects=(Subject(label, first.members),), notes=(note,)))
    assert all(c.isprintable() or c == "\n" for c in text)


def test_a_plan_says_what_error_to_expect_where_the_laboratory_s_runs_tell() -> None:
    early, late = (
        Checkpoint(Ref("x"), f"step{k}", (WeightFile("w", 1, f"{k}"),), step=k, tokens=tokens)
        for k, tokens in ((1, 2_000_000), (2, 4_000_000))
    )
    members = (replace(early, learning_rate=3e-3), replace(late, learning_rate=0.0))
    subjects = tuple(Subject(c.label, ((c, 1.0),)) for c in members)
    specs = (parse_scheme("gptq-3bit").spec,)
    of_lab = plan(subjects=subjects, specs=specs, parameters=1_050_496)
    text = row(render_plan(of_lab), "expect")
    match = re.fullmatch(
        r"added loss of step2 at 90 %: gptq-3bit (\S+) \[(\S+), (\S+)\] %, "
        r"by \d+ runs of the laboratory",
        text,
    )
    assert match, text
    estimate, low, high = map(float, match.groups())
    assert low < estimate < high
    assert not rows(render_plan(replace(of_lab, parameters=7 * GB)), "expect")
