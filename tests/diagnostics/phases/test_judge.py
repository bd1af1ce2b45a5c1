"""What is said of a run whose course is known: as much as its data carries, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from qaudit.core import changepoint, statistics
from qaudit.core.course import courses, place
from qaudit.diagnostics.phases import PhaseRun, changes_of, judge
from qaudit.judge.table import Measurements
from qaudit.types import Course, Diagnostics, Finding, Subject
from tests.support.courses import EVERY, checkpoint, measurements, subjects, table

N = 16
HELD = [3e-3] * 10
FALLING = [*HELD, *(3e-3 * (1 - k / 6) for k in range(1, 7))]
K = np.arange(N)
LEARNING = 3.0 + 1.2 * np.exp(-K)
FLAT = 0.05 + 0 * K
BREAKS = 0.04 + 0.04 * (K > 9)


def phases_of(found: Measurements) -> tuple[Course, ...]:
    return judge(found, Diagnostics())[0].phases


def phase_findings(found: Measurements) -> tuple[Finding, ...]:
    return judge(found, Diagnostics())[1]


@cache
def broken() -> Measurements:
    """Loss falls and then stays flat; one error breaks with the decay, the other never moves."""
    return table(FALLING, LEARNING, {"gptq-3bit": BREAKS, "gptq-4bit": FLAT / 5})


@cache
def broken_course() -> Course:
    (found,) = phases_of(broken())
    return found


def rules(found: Measurements) -> list[tuple[str, str | None]]:
    return [(f.rule, f.scheme) for f in phase_findings(found)]


# --------------------------------------------------------------------- what a run is


def test_of_parallel_ingredients_the_longest_is_followed() -> None:
    first = [checkpoint(k) for k in (1, 2)]
    one = [checkpoint(3, ingredient=1, label="a3")]
    two = [checkpoint(k, ingredient=2, label=f"b{k}") for k in (3, 4)]
    ((run, places),) = courses([*first, *one, *two])
    assert [c.label for c in run] == ["step1", "step2", "b3", "b4"]
    assert places.positions == (1e6, 2e6, 3e6, 4e6)


def test_what_goes_back_is_another_run() -> None:
    made = [checkpoint(k, label=f"a{k}") for k in (1, 2, 3)]
    fork = [checkpoint(k, label=f"b{k}") for k in (2, 3)]
    found = courses([*made, *fork])
    assert [[c.label for c in run] for run, _ in found] == [["a1", "a2", "a3"], ["b2", "b3"]]


def test_another_family_is_another_run() -> None:
    found = courses([checkpoint(1), checkpoint(2), checkpoint(3, family="other")])
    assert [len(run) for run, _ in found] == [2, 1]


def test_places_are_tokens_or_running_steps_or_an_order() -> None:
    stages = [
        checkpoint(s, stage=stage, tokens=None, label=f"{stage}{s}")
        for stage, s in (("one", 5), ("one", 10), ("two", 2), ("two", 4))
    ]
    assert place(stages).positions == (5, 10, 12, 14)
    assert place(stages).unit == "steps"
    assert place([replace(c, step=None) for c in stages]).positions == (1, 2, 3, 4)


# --------------------------------------------------------------------- change points


def test_a_break_is_placed_against_the_start_of_the_decay() -> None:
    course = broken_course()
    assert course.decay is not None
    assert (course.decay.low, course.decay.high) == (10 * EVERY, 11 * EVERY)
    row = next(row for row in course.changes if row.scheme == "gptq-3bit")
    assert row.verdict == "change"
    assert row.decay == "around"
    assert row.at is not None
    assert row.at.low <= 10.5 * EVERY <= row.at.high


def test_every_look_of_an_audit_shares_one_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[float] = []
    search = changepoint.find_break

    def counted(series: Any, level: float, **known: Any) -> Any:
        levels.append(level)
        return search(series, level, **known)

    monkeypatch.setattr("qaudit.diagnostics.phases.find_break", counted)
    phases_of(broken())  # two schemes
    singles = [s.first for s in broken().subjects]
    ((run, places),) = courses(singles)
    one = PhaseRun(broken(), run, places)
    changes_of(one, None, None, runs=3)
    assert set(levels[:3]) == {statistics.simultaneous(0.95, 2)}
    assert set(levels[3:]) == {statistics.simultaneous(0.95, 6)}


def test_an_error_that_never_moves_has_no_change_point() -> None:
    row = next(row for row in broken_course().changes if row.scheme == "gptq-4bit")
    assert (row.verdict, row.at, row.kind) == ("none", None, None)


@pytest.mark.parametrize("points", [2, 7])
def test_a_short_series_gets_no_change_point_and_is_told_why(points: int) -> None:
    found = table(HELD[:points], LEARNING[:points], {"rtn-4bit": BREAKS[-points:]})
    (course,) = phases_of(found)
    assert {row.verdict for row in course.changes} == {"unknown"}
    assert course.changes[0].reason == (f"{points} checkpoints, and it takes 8")
    assert "QA032" not in {rule for rule, _ in rules(found)}


def test_a_series_of_one_has_no_course() -> None:
    assert phases_of(table([1e-3], LEARNING[:1], {"rtn-4bit": FLAT[:1]})) == ()


def test_too_few_documents_say_nothing() -> None:
    found = table(FALLING, LEARNING, {"rtn-4bit": BREAKS}, documents=9)
    (course,) = phases_of(found)
    assert {row.verdict for row in course.changes} == {"unknown"}
    assert rules(found) == []


def test_a_scheme_that_lacks_a_checkpoint_is_left_out_by_name() -> None:
    made = subjects(FALLING)
    every = measurements([s.label for s in made], LEARNING, {"a": BREAKS, "b": FLAT})
    fewer = [m for m in every if (m.subject, m.scheme) != ("step4", "b")]
    (course,) = phases_of(Measurements.of(made, fewer, 0.95))
    row = next(row for row in course.changes if row.scheme == "b")
    assert row.verdict == "unknown"
    assert "finite loss" in row.reason


# --------------------------------------------------------------------- the rate and the loss


@pytest.mark.parametrize(
    ("rates", "reason"),
    [
        ([3e-3] * 5, "does not fall"),
        ([3e-3, 2e-3, 1e-3, 0.0], "from the first checkpoint on"),
        ([3e-3, None, 1e-3, 0.0], "not known"),
    ],
)
def test_where_the_decay_starts_is_not_guessed(rates: Sequence[float | None], reason: str) -> None:
    few = len(rates)
    (course,) = phases_of(table(rates, LEARNING[:few], {"rtn-4bit": FLAT[:few]}))
    assert course.decay is None
    assert reason in course.decay_reason


def test_the_loss_ends_where_its_course_lies_flat() -> None:
    end = broken_course().loss_end
    assert end is not None
    # 1.2 exp(-k) is half a percent of the loss at k = 4.4: the sixth checkpoint, or around it.
    assert 4 * EVERY <= end.low <= end.high <= 8 * EVERY


def test_a_loss_that_still_falls_has_not_ended() -> None:
    (course,) = phases_of(table(HELD, 3.0 - 0.05 * K[:10], {"rtn-4bit": FLAT[:10]}))
    assert course.loss_end is None
    assert "still improves" in course.loss_end_reason


def test_what_few_documents_cannot_tell_is_not_taken_for_an_end() -> None:
    found = table(HELD, 3.0 - 0.004 * K[:10], {"rtn-4bit": FLAT[:10]}, documents=12)
    (course,) = phases_of(found)
    assert course.loss_end is None
    assert "inconclusive" in course.loss_end_reason or "still" in course.loss_end_reason


# --------------------------------------------------------------------- advice


def test_stop_here_is_said_of_the_scheme_whose_error_grows() -> None:
    said = rules(broken())
    assert ("QA031", "gptq-3bit") in said
    assert ("QA031", "gptq-4bit") not in said
    assert ("QA030", "gptq-3bit") in said  # flat loss, larger error: earlier is better quantized
    assert ("QA032", "gptq-3bit") in said


def test_ship_before_names_the_best_quantized_checkpoint_and_what_was_gained() -> None:
    loss = 3.0 - 0.02 * K
    found = table(FALLING, loss, {"gptq-3bit": BREAKS * 2})
    advice = [f for f in phase_findings(found) if f.rule == "QA030"]
    assert len(advice) == 1
    assert "`step10` is better than `step16`" in advice[0].message
    assert "full precision gained 0.1" in advice[0].message
    assert advice[0].interval is not None
    assert advice[0].interval.low > 0


def test_a_healthy_run_gets_no_advice() -> None:
    assert rules(table(FALLING, 3.0 - 0.03 * K, {"gptq-4bit": FLAT / 5})) == []


def test_advice_seldom_comes_of_noise() -> None:
    alarms = sum(
        bool(rules(table(HELD, np.full(10, 3.0), {"a": FLAT[:10], "b": FLAT[:10]}, seed=seed)))
        for seed in range(8)
    )
    assert alarms <= 1


def test_soups_are_no_part_of_a_course() -> None:
    made = broken().subjects
    soup = Subject("soup", tuple((s.first, 0.5) for s in made[-2:]), "mean")
    extra = [replace(m, subject="soup") for m in broken().measurements if m.subject == "step16"]
    wider = Measurements.of((*made, soup), (*broken().measurements, *extra), 0.95)
    assert [c.checkpoints for c in phases_of(wider)] == [broken_course().checkpoints]
