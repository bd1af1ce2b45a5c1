"""A break is found where it is, seldom where it is not; and what is said of a run's course.

Courses of these tests are known: few samples tell what they hold.
"""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from scipy import stats

from benchmarks.changepoint import BROKEN, CHANCE, SMOOTH, looked_at, positions, series, shares
from qaudit.core import changepoint, statistics
from qaudit.core.changepoint import (
    MINIMUM_POINTS,
    Breaks,
    Trajectory,
    _Contrasts,
    find_break,
    trajectory,
)
from qaudit.core.course import courses, place
from qaudit.diagnostics import phases
from qaudit.diagnostics.phases import PhaseRun, changes_of, judge, section
from qaudit.judge import judge as judge_all
from qaudit.judge.table import Measurements
from qaudit.report.markdown import render_blocks
from qaudit.report.views import View
from qaudit.types import Diagnostics, Subject
from tests.support import sample
from tests.support.cards import titles, whole
from tests.support.courses import EVERY, checkpoint, measurements, subjects, table


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Take fewer samples: chances of 1 % are all that is expected."""
    fewer = partial(changepoint.trajectory, samples=399)
    monkeypatch.setattr("qaudit.diagnostics.phases.trajectory", fewer)


# --------------------------------------------------------------------- breaks of a series


SAMPLES = 199
BY_NAME = {case.name: case for case in (*SMOOTH, *BROKEN)}


def test_a_break_is_found_and_one_that_is_not_there_seldom():
    for name in ("straight", "saturating"):
        found = list(looked_at(BY_NAME[name], 12, 64, 60, SAMPLES))
        # 60 trials at 5 %: 7 or more alarms are a chance of 3 % at the very edge of the promise.
        assert sum(course.against_curve <= CHANCE for course in found) <= 6
    for name, points, trials, percents in (
        ("jump by half", 24, 30, {"found": 80, "holds": 90}),
        ("slope x 16", 12, 40, {"holds": 87.5}),
    ):
        row = shares(BY_NAME[name], list(looked_at(BY_NAME[name], points, 64, trials, SAMPLES)))
        assert all((row[key] or 0) >= least for key, least in percents.items())


def test_a_series_is_judged_the_same_twice_and_sampled_as_the_jackknife_says():
    first, again = (list(looked_at(BY_NAME["slope x 16"], 9, 20, 2, SAMPLES)) for _ in range(2))
    assert first == again
    few = MINIMUM_POINTS - 1
    sums = series(np.random.default_rng(0), SMOOTH[0], few, 20)
    with pytest.raises(ValueError, match="too few"):
        find_break(trajectory(positions(few), sums, statistics.excess, samples=20))
    sums = series(np.random.default_rng(3), SMOOTH[0], 8, 64)
    found = trajectory(positions(8), sums, statistics.excess, samples=4000)
    influence_ND = np.stack(
        [statistics.influences(tuple(sums[:, k]), statistics.excess)[1] for k in range(8)]
    )
    wide = (1 + 1 / 64) ** 2
    plain_NN = wide * influence_ND @ influence_ND.T / (64 * 63)
    sampled_NN = np.cov(found.moved_BN.T)
    # 4,000 samples know a standard deviation to about 1 %, and the jackknife is of first order.
    assert np.allclose(np.sqrt(np.diag(sampled_NN)), np.sqrt(np.diag(plain_NN)), rtol=0.08)
    assert np.allclose(sampled_NN, plain_NN, atol=0.1 * plain_NN.max())


def test_the_likelihood_is_that_of_a_plain_normal_density():
    draw = np.random.default_rng(0)
    x = np.linspace(0, 1, 9)
    mixed = np.eye(9) + 0.1 * draw.standard_normal((9, 9))  # none is lifted to the floor
    values = 3 + 2 * x + draw.standard_normal(9)
    found = Trajectory(x, values, draw.standard_normal((500, 9)) @ mixed)
    places = Breaks(x)
    line = _Contrasts.of(next(places.means()), places.shapes_CN, found)
    seen_1M = (found.values_N @ line.basis_NM)[None]
    spread_NN = found.moved_BN.T @ found.moved_BN / 500
    for which in (3, 8):
        spread_MM = line.basis_NM.T @ (spread_NN + line.variances[which] * np.eye(9))
        spread_MM = spread_MM @ line.basis_NM
        dense = stats.multivariate_normal(np.zeros(7), spread_MM)
        constant = -3.5 * np.log(2 * np.pi)
        none = line.without(seen_1M)[which, 0]
        assert none + constant == pytest.approx(dense.logpdf(seen_1M[0]), rel=1e-9)
        shape_M = line.shapes_CM[4]
        inverse = np.linalg.inv(spread_MM)
        size = (shape_M @ inverse @ seen_1M[0]) / (shape_M @ inverse @ shape_M)
        plain = dense.logpdf(seen_1M[0] - size * shape_M) - dense.logpdf(seen_1M[0])
        assert line.gains(seen_1M, line.weights[which])[4, 0] == pytest.approx(plain, rel=1e-9)


def test_level_slope_and_unit_of_a_course_do_not_matter():
    draw = np.random.default_rng(1)
    moved = 0.01 * draw.standard_normal((300, 10))
    x = np.linspace(1, 10, 10)
    y = 0.1 * x + 0.5 * np.maximum(0, x - 6) + 0.01 * draw.standard_normal(10)
    one = find_break(Trajectory(x, y, moved))
    other = find_break(Trajectory(1e9 * x, 7 + 3 * (y + x), 3 * moved))
    assert other.against_line == one.against_line
    assert other.best.at.estimate == pytest.approx(1e9 * one.best.at.estimate)
    assert other.best.effect.estimate == pytest.approx(3e-9 * one.best.effect.estimate, rel=1e-6)
    assert one.best.kind == "turn"
    assert one.best.at.low <= 6 <= one.best.at.high
    places = Breaks(np.arange(9.0))  # with two checkpoints on either side
    assert (places.at_C > places.x_N[1]).all()
    assert (places.at_C < places.x_N[-2]).all()


def test_a_run_is_the_longest_branch_and_its_places_are_tokens_or_steps_or_an_order():
    first = [checkpoint(k) for k in (1, 2)]
    one = [checkpoint(3, ingredient=1, label="a3")]
    two = [checkpoint(k, ingredient=2, label=f"b{k}") for k in (3, 4)]
    ((run, places),) = courses([*first, *one, *two])
    assert [c.label for c in run] == ["step1", "step2", "b3", "b4"]
    assert places.positions == (1e6, 2e6, 3e6, 4e6)
    made = [checkpoint(k, label=f"a{k}") for k in (1, 2, 3)]
    fork = [checkpoint(k, label=f"b{k}") for k in (2, 3)]
    runs = courses([*made, *fork, checkpoint(4, family="other")])
    assert [" ".join(c.label for c in run) for run, _ in runs] == ["a1 a2 a3", "b2 b3", "step4"]
    stages = [
        checkpoint(s, stage=stage, tokens=None, label=f"{stage}{s}")
        for stage, s in (("one", 5), ("one", 10), ("two", 2), ("two", 4))
    ]
    assert (place(stages).positions, place(stages).unit) == ((5, 10, 12, 14), "steps")
    assert place([replace(c, step=None) for c in stages]).positions == (1, 2, 3, 4)


# --------------------------------------------------------------------- change points


HELD = [3e-3] * 10
FALLING = [*HELD, *(3e-3 * (1 - k / 6) for k in range(1, 7))]
K = np.arange(16)
LEARNING = 3.0 + 1.2 * np.exp(-K)
FLAT = 0.05 + 0 * K
BREAKS = 0.04 + 0.04 * (K > 9)


def phases_of(found):
    return judge(found, Diagnostics())[0].phases


@cache
def broken():
    """Loss falls and then stays flat; one error breaks with the decay, the other never moves."""
    return table(FALLING, LEARNING, {"gptq-3bit": BREAKS, "gptq-4bit": FLAT / 5})


@cache
def broken_course():
    (found,) = phases_of(broken())
    return found


def test_breaks_are_placed_and_looks_share_one_chance(monkeypatch):
    course = broken_course()
    assert course.decay is not None
    assert (course.decay.low, course.decay.high) == (10 * EVERY, 11 * EVERY)
    row, still = (
        next(row for row in course.changes if row.scheme == scheme)
        for scheme in ("gptq-3bit", "gptq-4bit")
    )
    assert (row.verdict, row.decay) == ("change", "around")
    assert row.at is not None
    assert row.at.low <= 10.5 * EVERY <= row.at.high
    assert (still.verdict, still.at, still.kind) == ("none", None, None)
    levels = []
    search = changepoint.find_break

    def counted(series, level, **known):
        levels.append(level)
        return search(series, level, **known)

    monkeypatch.setattr("qaudit.diagnostics.phases.find_break", counted)
    phases_of(broken())  # two schemes
    ((run, places),) = courses([s.first for s in broken().subjects])
    changes_of(PhaseRun(broken(), run, places), None, None, runs=3)
    assert set(levels[:3]) == {statistics.simultaneous(0.95, 2)}
    assert set(levels[3:]) == {statistics.simultaneous(0.95, 6)}


def test_short_series_few_documents_and_missing_checkpoints_have_no_change_point():
    for points in (2, 7):
        found = table(HELD[:points], LEARNING[:points], {"rtn-4bit": BREAKS[-points:]})
        (course,) = phases_of(found)
        assert {row.verdict for row in course.changes} == {"unknown"}
        assert course.changes[0].reason == (f"{points} checkpoints, and it takes 8")
        assert "QA032" not in {rule for rule, _ in rules(found)}
    assert phases_of(table([1e-3], LEARNING[:1], {"rtn-4bit": FLAT[:1]})) == ()
    found = table(FALLING, LEARNING, {"rtn-4bit": BREAKS}, documents=9)
    (course,) = phases_of(found)
    assert {row.verdict for row in course.changes} == {"unknown"}
    assert rules(found) == []
    made = subjects(FALLING)
    every = measurements([s.label for s in made], LEARNING, {"a": BREAKS, "b": FLAT})
    fewer = [m for m in every if (m.subject, m.scheme) != ("step4", "b")]
    (course,) = phases_of(Measurements.of(made, fewer, 0.95))
    row = next(row for row in course.changes if row.scheme == "b")
    assert row.verdict == "unknown" and "finite loss" in row.reason


def test_where_the_decay_starts_is_not_guessed_and_the_loss_ends_where_it_lies_flat():
    for rates, reason in (
        ([3e-3] * 5, "does not fall"),
        ([3e-3, 2e-3, 1e-3, 0.0], "from the first checkpoint on"),
        ([3e-3, None, 1e-3, 0.0], "not known"),
    ):
        few = len(rates)
        (course,) = phases_of(table(rates, LEARNING[:few], {"rtn-4bit": FLAT[:few]}))
        assert course.decay is None
        assert reason in course.decay_reason
    end = broken_course().loss_end
    assert end is not None
    # 1.2 exp(-k) is half a percent of the loss at k = 4.4: the sixth checkpoint, or around it.
    assert 4 * EVERY <= end.low <= end.high <= 8 * EVERY
    errors = {"rtn-4bit": FLAT[:10]}
    for slope, documents, reasons in ((0.05, 64, ("still improves",)),
                                      (0.004, 12, ("inconclusive", "still"))):  # fmt: skip
        (course,) = phases_of(table(HELD, 3.0 - slope * K[:10], errors, documents=documents))
        assert course.loss_end is None
        assert any(reason in course.loss_end_reason for reason in reasons)


def rules(found):
    return [(f.rule, f.scheme) for f in judge(found, Diagnostics())[1]]


def test_advice_is_of_the_scheme_whose_error_grows_and_none_of_a_healthy_run():
    said = rules(broken())
    assert ("QA031", "gptq-3bit") in said
    assert ("QA031", "gptq-4bit") not in said
    assert ("QA030", "gptq-3bit") in said  # flat loss, larger error: earlier is better quantized
    assert ("QA032", "gptq-3bit") in said
    found = table(FALLING, 3.0 - 0.02 * K, {"gptq-3bit": BREAKS * 2})
    (advice,) = [f for f in judge(found, Diagnostics())[1] if f.rule == "QA030"]
    assert "`step10` is better than `step16`" in advice.message
    assert "full precision gained 0.1" in advice.message
    assert advice.interval is not None
    assert advice.interval.low > 0
    assert rules(table(FALLING, 3.0 - 0.03 * K, {"gptq-4bit": FLAT / 5})) == []
    flat = {"a": FLAT[:10], "b": FLAT[:10]}
    alarms = (bool(rules(table(HELD, np.full(10, 3.0), flat, seed=seed))) for seed in range(8))
    assert sum(alarms) <= 1
    made = broken().subjects  # soups are no part of a course
    soup = Subject("soup", tuple((s.first, 0.5) for s in made[-2:]), "mean")
    extra = [replace(m, subject="soup") for m in broken().measurements if m.subject == "step16"]
    wider = Measurements.of((*made, soup), (*broken().measurements, *extra), 0.95)
    assert [c.checkpoints for c in phases_of(wider)] == [broken_course().checkpoints]


def audit(few):
    made = subjects(([1e-3] * 7 + [1e-3 * (1 - k / 5) for k in range(1, 6)])[:few])
    errors = {"gptq-3bit": 0.04 + 0.05 * (K[:few] > 6), "gptq-4bit": 0.01 + 0 * K[:few]}
    found = measurements([s.label for s in made], LEARNING[:few], errors)
    files = {(m.subject, m.spec, 0): ("evidence/x.npz", "0" * 64) for m in found}
    tables, advice = phases.judge(Measurements.of(made, found, 0.95), Diagnostics())
    put = sample.put_together(found, made, judge_all(Measurements.of(made, found, 0.95), files))
    return replace(put, diagnostics=tables, findings=(*put.findings, *advice))


def test_the_card_says_where_the_error_changes_and_what_cannot_be_told():
    long = audit(12)
    text = render_blocks(section(View(long)).blocks)
    assert "starts to fall between `step7` and `step8`" in text
    assert "under gptq-3bit has a change point, a jump at 7.5M [7M, 8M] tokens" in text
    assert "indistinguishable from the start of the learning rate's decay" in text
    assert "No change point is detectable under gptq-4bit" in text
    assert "stops improving" in text
    assert "Phases" in titles(whole(long))
    text = render_blocks(section(View(audit(2))).blocks)
    assert "Change points were not searched: 2 checkpoints, and it takes 8" in text
    assert text.count("too few") <= 2
