"""What seeds show: intervals over seeds against scipy's, contrasts against an audit's own."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control

from experiments import addition
from experiments.__main__ import commands
from experiments.contrasts import (
    MeasuredSeed,
    estimate,
    log_ratio,
    over_repetitions,
    points_of,
    result_of,
    standing,
)
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
from experiments.summary import render_summary, write_summary
from experiments.table import (
    Claim,
    Contrast,
    ContrastResult,
    ExperimentSummary,
    SeedEstimate,
    SeedPoint,
    read_experiment,
    shipped_experiments,
)
from qaudit.core import statistics
from qaudit.types import Evidence, Fidelity, Interval, RolloutEvidence
from tests.support.cli import run_in

NUMBERS = st.floats(-10, 10, allow_nan=False)


def evidence(seed, level=2.0, documents=12):
    draw = np.random.default_rng(seed)
    tokens = np.random.default_rng(0).integers(20, 60, size=documents)
    return Evidence(
        document_sha256=tuple(f"{k:064x}" for k in range(documents)),
        nll_sum=tokens * (level + 0.1 * draw.standard_normal(documents)),
        tokens=tokens,
        nbytes=4 * tokens,
    )


def seed_of(seed, worse):
    """Return two models and their quantized ones; of divergences only a sum is read here."""
    levels = {("a", "fp"): 2.0, ("b", "fp"): 2.0, ("a", "rtn-3bit"): 2.2 + worse}
    found = {
        pair: evidence(10 * seed + k, level)
        for k, (pair, level) in enumerate({**levels, ("b", "rtn-3bit"): 2.2}.items(), 1)
    }
    for label, level in (("a", 0.2), ("b", 0.1)):
        one = found[label, "rtn-3bit"]
        none = np.zeros(len(one.tokens), dtype=np.int64)
        kl_sum = level * one.tokens * np.linspace(0.8, 1.2, len(one.tokens))
        fidelity = Fidelity(kl_sum, kl_sum, none[:, None], none, kl_sum)
        found[label, "rtn-3bit"] = replace(one, fidelity=fidelity)
    return MeasuredSeed(found, {"a": Interval(30.0, 20.0, 45.0), "b": Interval(10.0, 8.0, 12.5)})


def contrast(measure="error", expect="higher", margin=0.0):
    return Contrast("c", "a against b", "a", "b", measure, "rtn-3bit", expect, margin)


@given(st.lists(NUMBERS, min_size=2, max_size=9), st.sampled_from([0.8, 0.95, 0.99]))
def test_the_interval_over_seeds_is_student_s(values, confidence):
    found = over_repetitions(values, confidence)
    assert found is not None
    error = scipy.stats.sem(values)
    if error < 1e-12:  # scipy answers nan where there is no spread
        assert found.high - found.low < 1e-9
        return
    low, high = scipy.stats.t.interval(confidence, len(values) - 1, np.mean(values), error)
    # Both are a handful of additions and one quantile: they differ by rounding alone.
    np.testing.assert_allclose([found.low, found.high], [low, high], rtol=1e-9, atol=1e-12)


def test_a_seed_s_contrast_is_what_an_audit_says_of_the_pair():
    seed = seed_of(1, 0.3)
    found = seed.evidence
    kl = [found[label, "rtn-3bit"].fidelity.kl_sum for label in "ab"]
    a, b = ((found[one, "rtn-3bit"].nll_sum, found[one, "fp"].nll_sum) for one in "ab")
    tokens = found["a", "fp"].tokens
    wanted = {
        "error": statistics.interval((*a, *b), statistics.excess_difference),
        "lost": statistics.interval((*a, *b, tokens), statistics.change_difference),
        "loss": statistics.absolute_change(a[0], b[0], tokens),
        "kl": statistics.interval((*kl, tokens), statistics.change),
    }
    assert {measure: estimate(contrast(measure), seed, 0.95) for measure in wanted} == wanted
    points = points_of(1, seed, 0.95)
    assert [(p.subject, p.scheme) for p in points] == [("a", "rtn-3bit"), ("b", "rtn-3bit")]
    assert points[0].interval == statistics.relative_error(*a)
    assert points[0].quantized / points[0].loss - 1 == pytest.approx(points[0].interval.estimate)


def test_traces_are_compared_by_their_ratio_and_what_is_missing_is_not_measured():
    found = estimate(contrast("trace"), seed_of(1, 0.3), 0.95)
    assert found is not None
    # The larger of the two steps decides: 30/20 below against 12.5/10, 45/30 above against 10/8.
    half = math.hypot(math.log(1.5), math.log(1.25))
    assert [found.estimate, found.low, found.high] == pytest.approx(
        [math.log(3), math.log(3) - half, math.log(3) + half], rel=1e-12
    )
    assert estimate(contrast("trace"), MeasuredSeed(seed_of(1, 0.3).evidence), 0.95) is None
    assert log_ratio(Interval(1.0, -0.1, 2.0), Interval(1.0, 0.9, 1.1)) is None
    seed = seed_of(1, 0.3)
    bare = {key: replace(e, fidelity=None) for key, e in seed.evidence.items()}
    assert estimate(contrast("kl"), MeasuredSeed(bare), 0.95) is None
    seed.evidence["a", "rtn-3bit"].nll_sum[3] = np.nan
    assert estimate(contrast(), seed, 0.95) is None
    del seed.evidence["b", "rtn-3bit"]  # type: ignore[attr-defined]
    result = result_of(contrast(), {1: seed}, 0.95)
    assert (result.seeds, result.interval, result.standing) == ((), None, "not measured")


def test_a_claim_stands_with_the_interval_over_seeds():
    for expect, margin, interval, wanted in (
        ("higher", 0.0, (0.1, 0.3), "agrees"),
        ("higher", 0.0, (-0.3, -0.1), "disagrees"),
        ("higher", 0.0, (-0.1, 0.3), "inconclusive"),
        ("lower", 0.0, (-0.3, -0.1), "agrees"),
        ("lower", 0.0, (0.1, 0.3), "disagrees"),
        ("near", 0.5, (-0.1, 0.3), "agrees"),
        ("near", 0.5, (0.6, 0.9), "disagrees"),
        ("near", 0.5, (-0.9, -0.6), "disagrees"),
        ("near", 0.5, (-0.1, 0.6), "inconclusive"),
        (None, 0.0, (0.1, 0.3), "open"),
    ):
        low, high = interval
        found = Interval((low + high) / 2, low, high)
        assert standing(contrast(expect=expect, margin=margin), 3, found) == wanted
    inside = Interval(0.001, -0.001, 0.003)
    near = contrast(expect="near", margin=0.005)
    assert standing(near, 3, inside, (0.004, -0.003)) == "too wide"
    assert standing(near, 3, inside, (0.004, 0.006)) == "agrees"
    assert standing(contrast("loss", expect="near", margin=0.005), 3, inside, (0.004,)) == "agrees"
    for worse, wanted in (((1.0, 1.0, 1.0), "agrees"), ((1.0, -1.0, 0.2), "inconclusive")):
        found = {seed: seed_of(seed, one) for seed, one in enumerate(worse, 1)}
        assert result_of(contrast(), found, 0.95).standing == wanted
    alone = result_of(contrast(), {1: seed_of(1, 5.0)}, 0.95)
    assert (alone.interval, alone.standing) == (None, "inconclusive")
    assert alone.seeds[0].interval.low > 0


# --------------------------------------------------------------------------------------------------
# A summary of an experiment: as JSON and back, as Markdown, as a picture.


CLAIM = Claim("c", "somebody, figure 1", "Decay hurts.")
LOSS = Contrast("c", "at the end", "cool@2", "held@2", "loss", "fp")
ERROR = Contrast("c", "at the end", "cool@2", "held@2", "error", "rtn-3bit", "higher")


def result(contrast, *values):
    seeds = [SeedEstimate(k, Interval(v, v - 0.01, v + 0.01)) for k, v in enumerate(values, 1)]
    mean = sum(values) / len(values) if values else 0.0
    whole = Interval(mean, mean - 0.02, mean + 0.02) if len(values) > 1 else None
    return ContrastResult(contrast, tuple(seeds), whole, "agrees" if values else "not measured")


SUMMARY = ExperimentSummary(
    experiment="cooled", size="cpu", description="A held rate against a straight line.",
    command="python -m experiments run cooled --size cpu --seeds 2", seeds=(1, 2),
    parameters=1_050_496, tokens=5_000_000, documents=100, confidence=0.95,
    subjects=("held@2", "cool@2"), claims=(CLAIM,),
    results=(result(ERROR, 0.03, 0.05), result(replace(ERROR, scheme="gptq-3bit")),
             result(LOSS, 0.1, 0.3)),
    points=tuple(SeedPoint(seed, subject, "rtn-3bit", 3.0, 3.1, Interval(0.03, 0.02, 0.04))
                 for seed in (1, 2) for subject in ("held@2", "cool@2")),
    environment={"python": "3.11"},
)  # fmt: skip


def test_a_summary_is_read_as_it_was_written_and_says_its_units(tmp_path):
    for name, summary in (("a", SUMMARY), ("b", SUMMARY)):
        write_summary(summary, tmp_path / name)
    assert read_summary(tmp_path / "a" / "summary.json") == SUMMARY
    written = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert written == ["summary.json", "summary.md", "summary.svg"]
    first = (tmp_path / "a" / "summary.svg").read_bytes()
    assert first == (tmp_path / "b" / "summary.svg").read_bytes()
    write_summary(replace(SUMMARY, results=SUMMARY.results[:1]), tmp_path / "b")
    assert first != (tmp_path / "b" / "summary.svg").read_bytes()
    lines = [line for line in render_summary(SUMMARY).splitlines() if line[:8] == "| at the"]
    error, missing, loss = ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    values = ["3.0 [2.0, 4.0]", "5.0 [4.0, 6.0]", "4.0 [2.0, 6.0]"]
    assert error[1:] == ["rtn-3bit", "> 0", *values, "agrees"]
    assert missing[3:] == ["-", "-", "-", "-"]
    assert (loss[0][-4:], loss[3]) == ("nats", "0.100 [0.090, 0.110]")
    odd = Claim("c", "<b>x</b>", "a | b\n# c")
    text = render_summary(replace(SUMMARY, claims=(odd,), description="<script> *x*"))
    assert not any(tag in text for tag in ("<b>", "<script>", "\n# c"))


# --------------------------------------------------------------------------------------------------
# docs/science.md says what the saved summaries say, and they are of the experiments that ship.


def test_the_page_kept_summaries_and_their_corrections_are_up_to_date():
    corrected = Corrected.of(summaries())
    names = list(corrected.p)
    assert len(names) > 50
    adjusted = false_discovery_control([corrected.p[name] for name in names])
    kept = {name for name, p in zip(names, adjusted, strict=True) if p <= 0.05}
    assert corrected.discovered() == kept
    smallest = min(names, key=lambda name: corrected.p[name])
    assert corrected.certain() <= kept
    assert (smallest in corrected.certain()) == (corrected.p[smallest] <= 0.05 / len(names))
    text = PAGE.read_text(encoding="utf-8")
    assert rendered(text) == text, "run `python -m experiments.science`"
    assert (FOLDER / "contrasts.csv").read_text("utf-8") == contrasts(summaries())
    rows = overview(dict.fromkeys(shipped_experiments())).splitlines()[2:]
    assert len(rows) > 10
    assert all(re.search(r"(\| -\s+){5}\|$", row) for row in rows)  # where nothing was run
    if FOLDER.is_dir():
        assert {path.stem for path in FOLDER.iterdir()} <= {*shipped_experiments(), "contrasts"}
    pairs = []
    for name, summary in summaries().items():
        if summary is None:
            continue
        compared = tuple(result.contrast for result in summary.results)
        assert compared == read_experiment(name).contrasts_by_scheme(), name
        assert summary.subjects, name
        assert (FOLDER / f"{name}.svg").is_file(), name
        assert rejudged(summary) == summary, name
        pairs += [(c.a, c.b, c.scheme, c.measure) for c in compared]
    assert len(pairs) == len(set(pairs))  # none is counted in two experiments


# --------------------------------------------------------------------------------------------------
# The experiment that compares expected scores with generation: `experiments/addition.py`.


def test_every_sum_is_there_once_and_an_answer_is_right_where_it_is_the_sum_alone():
    sums = addition.problems()
    assert len(set(sums)) == len(sums) == 90 * 90
    assert all(sum(map(int, s.partition("=")[0].split("+"))) == int(s[6:]) for s in sums)
    assert addition.prompt_of("12+34=46") == "<|endoftext|>12+34="
    answers = [
        {"prompt": 1, "sample": k, "greedy": False, "text": text}
        for k, text in enumerate(("46", "47", "460", ""))
    ]
    marks = map(json.loads, addition.marks_of(answers, ["10+10=20", "12+34=46"]))
    assert list(marks) == [
        {"prompt": 1, "sample": k, "greedy": False, "correct": k == 0} for k in range(4)
    ]


def test_weighted_answers_are_compared_by_prompt_and_a_refused_score_has_its_reason():
    prompts, samples = 60, 4
    count = prompts * samples
    right = np.arange(count) % samples < 2

    def drawn(log_p_S):
        return RolloutEvidence(
            sha256="", prompt=np.repeat(np.arange(prompts), samples), tokens=np.full(count, 3),
            nll_sum=-log_p_S, agreed=np.full(count, -1), end_names=(),
            end_sum=np.zeros((count, 0)), mark=right.astype(np.float64), drawn_sum=log_p_S,
        )  # fmt: skip

    full = drawn(np.full(count, -1.0))
    stream = drawn(np.where(right, -1.1, -0.9))  # right answers are less likely
    answers = [(k, sample < 9) for k in range(prompts) for sample in range(20)]  # 45 %
    row = addition.compare("rtn-4bit", stream, full, answers)
    weight = np.exp([-0.1, 0.1])
    found = [one.estimate for one in (row.expected, row.generated, row.difference)]
    share = weight[0] / weight.sum()
    assert found == pytest.approx([share, 0.45, share - 0.45])
    assert "| rtn-4bit | 45.0 [45.0, 45.0] |" in addition.table(7, [row])
    far = drawn(np.where(np.arange(count) < 5, 3.0, -9.0))
    row = addition.compare("rtn-2bit", far, full, [(k, False) for k in range(prompts)])
    assert row.expected is None
    assert "effective sample size is 5 of 240" in addition.table(7, [row])


@pytest.mark.slow
def test_the_whole_experiment_in_a_small_size(tmp_path, capsys, monkeypatch):
    def run(*arguments, module="qaudit"):
        of_module = commands if module == "experiments" else None
        assert run_in(tmp_path, *arguments, commands=of_module) == 0

    monkeypatch.setattr("experiments.addition.run", run)  # without a process for each command
    size = ["--steps", "20", "--prompts", "10", "--generated", "2", "--schemes", "rtn-4bit"]
    addition.main([str(tmp_path), *size])
    printed = capsys.readouterr().out
    assert "| 20 steps | expected |" in printed
    assert "| rtn-4bit |" in printed
