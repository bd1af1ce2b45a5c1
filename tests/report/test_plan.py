"""A plan as people read it, aligned, in 80 columns; and a series as a table, folded and cut."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.course import NO_WEIGHTS, bad_report
from qaudit.report.plan import Catalog, catalog_to_json, render_catalog, render_plan
from qaudit.types import Checkpoint, Finding, Plan, Ref, Subject, Traffic, WeightFile
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
CACHED = plan(traffic=Traffic(0, 61 * GB, 0, 212 * GB, 100 * GB))
CUDA = plan(device="cuda", seconds_low=1800.0, seconds_high=7200.0)
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
        (CACHED, "fetch", "nothing: 61.0 GB are in the cache"),
        (CUDA, "time", "30 min to 2.0 h, 0.5 to 2 GPU hours"),
        (TOLD, "text", "evaluation: hf://datasets/a/b/c.txt"),
        (TOLD, "finding", "QA009 a and b are the same (take one)"),
        (TOLD, "against", "each its full precision, and all of them stage1-step500"),
        (ALONE["soup"], "plan", "1 soup, 8 schemes and full precision: 135 streams"),
        (ALONE["checkpoint"], "plan", "1 checkpoint, 8 schemes and full precision: 135 streams"),
    ],
)
def test_each_line_says_what_is_known(plan: Plan, word: str, text: str) -> None:
    assert row(render_plan(plan), word) == text


def test_what_is_not_there_has_no_line_and_a_long_series_is_folded() -> None:
    text = render_plan(plan())
    assert not [word for word in ("fetch", "disk", "against", "finding") if rows(text, word)]
    assert "16 of 965" in rows(render_plan(TOLD), "note")
    assert row(text, "measure") == (
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


# ------------------------------------------------------------------ a series as a table


def checkpoint(label: str, sha: str | None = None, **known: object) -> Checkpoint:
    files = (WeightFile("w", 5_000_000, sha),) if sha else ()
    return Checkpoint(Ref("o/n", label), label, files, **known)  # type: ignore[arg-type]


def catalog(*checkpoints: Checkpoint, selected: tuple[str, ...] = (), **more: object) -> Catalog:
    return Catalog(("o/n",), checkpoints, frozenset(selected), **more)  # type: ignore[arg-type]


def table(*checkpoints: Checkpoint, selected: tuple[str, ...] = (), **how: object) -> list[str]:
    text = render_catalog(catalog(*checkpoints, selected=selected), **how)  # type: ignore[arg-type]
    return text.split("\n\n")[1].splitlines()[1:]


STEPS = tuple(checkpoint(f"step{n}", step=n, stage="s") for n in range(1000, 9001, 1000))


def test_what_is_not_known_is_a_dash_and_what_is_not_there_is_said() -> None:
    (unknown, empty, zero) = table(
        checkpoint("a"),
        checkpoint("b", suspect=(NO_WEIGHTS,)),
        checkpoint("c", "1", step=0, tokens=0, learning_rate=0.0, stage="s", ingredient=2),
    )
    assert unknown.split() == ["a", "-", "-", "-", "-", "-"]
    assert empty.split() == ["b", "-", "-", "-", "-", "none", "1"]
    assert zero.split() == ["c", "s", "i2", "0", "0", "0", "5.0", "MB"]


def test_rows_that_say_nothing_are_folded_with_their_steps_and_no_gap_is_hidden() -> None:
    rows = table(*STEPS, selected=("step6000",))
    assert rows == [
        "  ... 5 more of s, steps 1,000 to 5,000, every 1,000",
        "* step6000   s     6,000      -  -    -",
        "  step7000   s     7,000      -  -    -",
        "  step8000   s     8,000      -  -    -",
        "  step9000   s     9,000      -  -    -",
    ]
    assert len(table(*STEPS, everything=True)) == 9
    assert len(table(*(checkpoint(f"name-{k}") for k in "abcdefgh"))) == 8  # no numbers
    odd = [c for c in STEPS if c.step != 4000]
    assert table(*odd) == ["  ... 8 more of s, steps 1,000 to 9,000, mostly every 1,000"]
    uneven = [checkpoint(f"step{n}", step=n, stage="s") for n in (1, 2, 4, 8, 16)]
    assert table(*uneven) == ["  ... 5 more of s, steps 1 to 16"]


def test_what_is_odd_is_never_folded_with_what_is_not() -> None:
    bad = checkpoint("step4500", step=4500, stage="s", suspect=(bad_report("why"),))
    rows = table(*STEPS[:4], bad, *STEPS[4:])
    assert len(rows) == 3
    assert rows[1].split() == ["step4500", "s", "4,500", "-", "-", "-", "1"]
    some = (bad_report("why", some=True),)
    (row,) = table(*(checkpoint(f"step{n}", step=n, suspect=some) for n in range(99)))
    assert row.split()[-1] == "1"  # of one defect: folded and numbered
    assert "99 more, steps 0 to 98" in row


def test_sentences_stand_once_below_with_the_rows_they_hold_for() -> None:
    text = render_catalog(
        catalog(
            checkpoint("a", "1", step=1, notes=("inferred",)),
            checkpoint("b", "1", step=2, suspect=("odd",)),
            checkpoint("c", "2", step=3, notes=("not shown",), suspect=("odd",)),
            selected=("a",),
            findings=(
                Finding("QA015", "warn", "c", None, "`c` is a mix", "leave it"),
                Finding("QA009", "warn", "a", None, "told in the table", ""),
            ),
            remarks=("a remark",),
        )
    )
    assert [line.split()[-1] for line in text.splitlines()[3:6]] == ["1", "1,2", "2"]
    assert "\n\n1 the same weights: a, b\n2 odd\nQA015 `c` is a mix\n\ninferred\n\n" in text
    assert "a remark" in text
    assert "told in the table" not in text
    assert "not shown" not in text


def test_one_commit_under_two_names_and_a_size_are_known_without_a_hash() -> None:
    pair = [checkpoint(name, commit="0" * 40) for name in ("step9", "main")]
    assert "1 one commit: step9, main" in render_catalog(catalog(*pair))
    text = render_catalog(catalog(checkpoint("a"), nbytes={"a": 7_000_000}))
    assert "7.0 MB" in text
    assert "1 checked" in text
    assert "not checked" not in text
    assert "not checked (`--check`" in render_catalog(catalog(checkpoint("a")))


def test_names_that_do_not_fit_are_cut_in_their_middle() -> None:
    name = "stage2-ingredient1-step11931-tokens50B-with-a-long-tail-that-goes-on"
    long = checkpoint(name, step=1)
    (row,) = table(long, width=80)
    assert len(row) <= 80
    assert row.startswith("  stage2-")
    assert "..oes-on " not in row
    assert ".." in row
    assert "goes-on" in row
    (whole,) = table(long)
    assert long.label in whole


LABELS = st.text(st.characters(codec="utf-8"), max_size=200)


@given(st.lists(LABELS, min_size=1, max_size=8, unique=True), st.integers(80, 120))
def test_whatever_the_names_no_line_is_wider_and_no_cursor_moves(
    names: list[str], width: int
) -> None:
    found = [checkpoint(name, step=k, stage="stage1") for k, name in enumerate(names)]
    text = render_catalog(catalog(*found, selected=tuple(names)), width=width, everything=True)
    assert max(map(len, text.split("\n"))) <= width
    assert all(c.isprintable() for c in text if c != "\n")
    assert len(text.split("\n\n")[1].split("\n")) == 1 + len(names)


def test_json_is_whole() -> None:
    found = json.loads(catalog_to_json(catalog(*STEPS, checkpoint("x", "1"), selected=("x",))))
    assert len(found["checkpoints"]) == 10
    last = found["checkpoints"][-1]
    assert [last[key] for key in ("ref", "revision")] == ["o/n@x", "x"]
    assert last["selected"] is last["checked"] is True
    assert found["checkpoints"][0]["nbytes"] is None
