"""A plan as people read it: aligned, in 80 columns, with what is not known left out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.report.plan import render_plan
from qaudit.types import (
    Finding,
    Plan,
    Subject,
    Traffic,
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
