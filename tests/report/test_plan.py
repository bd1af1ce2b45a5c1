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


RECIPE = sample.audit().plan.recipe
HUB = plan(traffic=Traffic(350 * GB, 2 * GB, 61 * GB, 212 * GB, 100 * GB))
TOLD = plan(
    recipe=replace(RECIPE, evaluation="hf://datasets/a/b/c.txt", reference="stage1-step500"),
    findings=(Finding("QA009", "warn", "soup", None, "`a` and `b` are the same", "take one"),),
    notes=("16 of 965",),
)
ALONE = {kind: plan(subjects=tuple(s for s in sample.series() if s.kind == kind)[:1])
         for kind in ("soup", "checkpoint")}  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "word", "text"),
    [
        (plan(), "plan", "14 checkpoints and 1 soup, 8 schemes and full precision: 135 streams"),
        (plan(), "time", "40 s to 2 min"),
        (plan(), "model", "1.18M parameters, 4 blocks, float32 on cpu, context 256"),
        (HUB, "fetch", "350.0 GB: 47 min at 1 Gbit/s; 2.0 GB more are in the cache"),
        (HUB, "disk", "at most 61.0 GB at a time, 100.0 GB allowed, 212.0 GB free"),
        (HUB, "time", "40 s to 2 min to compute; downloads run at the same time"),
        (
            plan(traffic=Traffic(0, 61 * GB, 0, 212 * GB, 100 * GB)),
            "fetch",
            "nothing: 61.0 GB are in the cache",
        ),
        (
            plan(device="cuda", seconds_low=1800.0, seconds_high=7200.0),
            "time",
            "30 min to 2.0 h, 0.5 to 2 GPU hours",
        ),
        (TOLD, "text", "evaluation: hf://datasets/a/b/c.txt"),
        (TOLD, "finding", "QA009 a and b are the same (take one)"),
        (TOLD, "against", "each its full precision, and all of them stage1-step500"),
        (ALONE["soup"], "plan", "1 soup, 8 schemes and full precision: 135 streams"),
        (ALONE["checkpoint"], "plan", "1 checkpoint, 8 schemes and full precision: 135 streams"),
    ],
)
def test_each_line_says_what_is_known(plan: Plan, word: str, text: str) -> None:
    assert row(render_plan(plan), word) == text


def test_what_is_not_there_has_no_line() -> None:
    text = render_plan(plan())
    assert not [word for word in ("fetch", "disk", "against", "finding") if rows(text, word)]
    assert "16 of 965" in rows(render_plan(TOLD), "note")


def test_what_is_measured_is_named_and_a_long_series_folded() -> None:
    assert row(render_plan(plan()), "measure") == (
        "stage1-step500, stage1-step1000, stage1-step1750, stage1-step2500, stage1-step3250, "
        "stage1-step4000, 3 more, stage2-ingredient1-step500, stage2-ingredient1-step750, "
        "stage2-ingredient1-step1000, stage2-ingredient2-step1000, stage2-ingredient3-step1000, "
        "soup"
    )
    few = plan(subjects=sample.series()[:2])
    assert row(render_plan(few), "measure") == "stage1-step500, stage1-step1000"


@given(st.text(), st.text())
def test_no_name_moves_the_cursor(label: str, note: str) -> None:
    first = sample.series()[0]
    text = render_plan(plan(subjects=(Subject(label, first.members),), notes=(note,)))
    assert all(c.isprintable() or c == "\n" for c in text)
