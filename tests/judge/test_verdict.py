"""What ships of each bit class: subject and scheme together, whatever the order of the schemes."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core import statistics
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import most_bits_first
from qaudit.judge.choose import (
    LOSS,
    ClassChoice,
    Objective,
    choices,
    classes_of,
    parse_objective,
    preferred_verdict,
)
from qaudit.judge.gate import GateInput, gate, verdict_of
from qaudit.judge.table import Measurements
from qaudit.policy import preset
from qaudit.types import (
    ByConfidence,
    Checkpoint,
    ClassVerdict,
    Evidence,
    Fidelity,
    Gate,
    Ignore,
    Interval,
    Level,
    Measurement,
    Policy,
    PolicyRule,
    Ref,
    Subject,
    Verdict,
)
from tests.support import sample
from tests.support.measured import measurement

Losses = dict[tuple[str, str], float]
TODAY = date(2026, 6, 15)
SCHEMES = ("bnb-int8", "gptq-4bit", "bnb-nf4", "gptq-3bit", "rtn-3bit")


def measured(losses: Losses, *, seed: int = 0, noise: float = 0.01) -> list[Measurement]:
    """Return measurements on the same 60 documents."""
    draw = np.random.default_rng(seed)
    tokens = np.full(60, 100)
    base = np.exp(0.2 * draw.standard_normal(60)) * tokens
    rows = []
    for (subject, scheme), loss in losses.items():
        own = np.random.default_rng([seed, *f"{subject} {scheme}".encode()])
        nll = base * loss + own.standard_normal(60) * noise
        evidence = Evidence(tuple(map(str, range(60))), nll, tokens, tokens * 4)
        spec = parse_scheme(scheme).spec if scheme != "fp" else "fp"
        rows.append(measurement(subject, scheme, spec, evidence, 4.25))
    return rows


def shipped(
    table: Measurements, objective: Objective = LOSS, classes: tuple[str, ...] = ()
) -> list[ClassVerdict]:
    return [preferred_verdict(table, choice) for choice in choices(table, objective, classes)]


def table_of(rows: list[Measurement]) -> Measurements:
    names = dict.fromkeys(sorted({m.subject for m in rows}))
    subjects = tuple(Subject(n, ((Checkpoint(Ref(n), n), 1.0),)) for n in names)
    return Measurements.of(subjects, rows, 0.95)


# ------------------------------------------------------------------------------- bit classes


@pytest.mark.parametrize(
    ("scheme", "bits", "expected", "calibrates"),
    [
        ("gptq-4bit", 4.2, "4", True),
        ("gptq:bits=3:group=64", 3.3, "3", True),
        ("rtn-8bit", 8.2, "8", False),
        ("bnb-nf4", 4.1, "4", False),
        ("bnb-int8:threshold=6.0", 8.0, "8", False),  # outliers are left in the model's dtype
        ("fp8", 8.0, "w8a8", False),
        ("nvfp4", 4.5, "w4a4", True),
        ("nvfp4a16", 4.5, "4", False),
        ("mxfp4:rule=floor", 4.2, "w4a4", False),
        ("smoothquant:alpha=0.8", 8.0, "w8a8", True),
        ("gptq-4bit:kv=fp8", 4.2, "4kv8", True),
        ("quarot:bits=4:act=4:kv=int4", 4.2, "w4a4kv4", True),
        ("quik-4bit", 5.8, "w4a4", True),
        ("gguf-q4_0:importance=false", 4.5, "4", False),
        ("gguf-q4_0:importance=true", 4.5, "4", True),
        # Files of llama.cpp compete by the bits that they store.
        ("gguf-q4_k", 4.5, "4", False),
        ("gguf-q4_k", 5.5, "5", False),  # Q5_0, where 256 does not divide the columns
        ("gguf-q5_k", 6.0, "5", False),  # Q5_1: a scale and a minimum take a bit together
        ("gguf-q6_k", 8.5, "8", False),
        ("gguf-q4_k_m", 4.9, "4", False),
        ("gguf-q4_k_m", 5.9, "5", False),
        ("gguf-q3_k:kv=int8", 3.4375, "3kv8", False),
        ("gguf-q4_k", float("nan"), "4", False),
    ],
)
def test_a_bit_class_is_that_of_the_codes(
    scheme: str, bits: float, expected: str, calibrates: bool
) -> None:
    known = parse_scheme(scheme)
    assert (known.class_at(bits), known.calibrates) == (expected, calibrates)


def test_a_type_of_five_bits_does_not_win_four() -> None:
    rows = measured({("a", "gguf-q4_k"): 2.0, ("a", "rtn-4bit"): 2.1})
    rows[0] = replace(rows[0], bits_per_weight=5.5, bit_class="5")
    ships = {one.bit_class: one.scheme for one in shipped(table_of(rows))}
    assert ships == {"5": "gguf-q4_k", "4": "rtn-4bit"}


def test_classes_with_activations_stand_behind_those_of_weights_alone() -> None:
    names = ["w4a4", "3", "4kv8", "w8a8", "4", "8", "w4a8"]
    assert sorted(names, key=most_bits_first) == ["8", "w8a8", "4", "4kv8", "w4a4", "w4a8", "3"]


def test_classes_have_the_most_bits_first() -> None:
    rows = measured({("a", scheme): 2.0 for scheme in reversed(SCHEMES)})
    assert classes_of(table_of(rows)) == ("8", "4", "3")


# ------------------------------------------------------------------------------- the choice


def test_subject_and_scheme_are_chosen_together() -> None:
    losses = {
        ("a", "gptq-4bit"): 2.1, ("a", "bnb-nf4"): 2.3,
        ("b", "gptq-4bit"): 2.2, ("b", "bnb-nf4"): 2.0,
    }  # fmt: skip
    (only,) = shipped(table_of(measured(losses)))
    assert (only.subject, only.scheme) == ("b", "bnb-nf4")
    assert (only.runner_up, only.runner_up_scheme) == ("a", "gptq-4bit")
    assert only.contenders == ()
    assert only.changes == ("without bnb-nf4 it would be `a` at gptq-4bit",)


def test_one_checkpoint_under_many_schemes_has_an_answer_for_each_class() -> None:
    losses = {
        ("a", "fp"): 2.0, ("a", "bnb-int8"): 2.001, ("a", "gptq-4bit"): 2.04,
        ("a", "bnb-nf4"): 2.06, ("a", "gptq-3bit"): 2.3, ("a", "rtn-3bit"): 2.9,
    }  # fmt: skip
    every = shipped(table_of(measured(losses)))
    told_of = [(one.bit_class, one.scheme, one.runner_up_scheme) for one in every]
    assert told_of == [
        ("8", "bnb-int8", None), ("4", "gptq-4bit", "bnb-nf4"), ("3", "gptq-3bit", "rtn-3bit"),
    ]  # fmt: skip
    errors = [one.relative_error.estimate for one in every if one.relative_error]
    assert errors == pytest.approx([0.0005, 0.02, 0.15], rel=0.05)


def test_the_fourth_class_is_measured_or_named_as_absent() -> None:
    every = shipped(table_of(measured({("a", "gptq-4bit"): 2.0})), classes=("4", "2"))
    assert [(one.bit_class, one.subject) for one in every] == [("4", "a"), ("2", None)]


@given(st.permutations(range(10)), st.integers(0, 5), st.sampled_from([0.0, 0.01]))
def test_the_order_of_measurements_changes_nothing(order: list[int], seed: int, noise: float):
    losses = {(s, q): 2.0 + 0.01 * (q[-4:] == "3bit") for s in ("a", "b") for q in SCHEMES}
    rows = measured(losses, seed=seed, noise=noise)  # without noise everything is a tie
    for objective in ("loss", "bits@3%"):
        wanted = parse_objective(objective)
        plain, shuffled = table_of(rows), table_of([rows[k] for k in order])
        assert shipped(shuffled, wanted) == shipped(plain, wanted)


# ------------------------------------------------------------------------------- choosing is paid


def tied(bits: dict[str, float], *, documents: int = 60, noise: float = 5.0) -> list[Measurement]:
    """Return schemes of one subject that add 1 % each, alike but for noise, and their bits."""
    losses = {("a", "fp"): 2.0} | {("a", scheme): 2.02 for scheme in bits}
    rows = measured(losses, seed=1, noise=noise)
    cut = {m.scheme: of_first(m.evidence, documents) for m in rows}
    return [
        replace(m, evidence=cut[m.scheme], bits_per_weight=bits.get(m.scheme, 16.0)) for m in rows
    ]


def of_first(evidence: Evidence, count: int) -> Evidence:
    columns = ("document_sha256", "nll_sum", "tokens", "nbytes")
    return replace(evidence, **{name: getattr(evidence, name)[:count] for name in columns})


def only_choice(rows: list[Measurement], objective: Objective = LOSS) -> ClassChoice:
    (choice,) = choices(table_of(rows), objective)
    return choice


BITS = {"gptq-4bit": 4.12, "bnb-nf4": 4.5, "rtn-4bit": 4.25}


def test_a_tie_goes_to_fewer_bits_and_the_bound_pays_for_all_of_it() -> None:
    rows = tied(BITS)
    (ships,) = shipped(table_of(rows))
    assert (ships.scheme, ships.at_once, len(ships.contenders)) == ("gptq-4bit", 3, 2)
    own, full = ({m.scheme: m.evidence.nll_sum for m in rows}[s] for s in ("gptq-4bit", "fp"))
    plain, paid = (statistics.relative_error(own, full, level) for level in (0.95, 1 - 0.05 / 3))
    assert ships.relative_error == Interval(plain.estimate, plain.low, paid.high)
    assert paid.high > plain.high


def test_equal_bits_go_to_the_lower_divergence() -> None:
    rows = tied(dict.fromkeys(BITS, 4.25))
    kl = {"gptq-4bit": 0.02, "bnb-nf4": 0.01, "rtn-4bit": 0.03}
    rows = [m if m.scheme == "fp" else with_divergence(m, kl[m.scheme]) for m in rows]
    (ships,) = shipped(table_of(rows))
    assert ships.scheme == "bnb-nf4"


def test_a_contender_of_another_subject_does_not_ship_for_its_bits() -> None:
    rows = [replace(m, bits_per_weight=4.0 if m.subject == "b" else 4.5) for m in measured(
        {(s, q): 2.0 for s in ("a", "b") for q in ("fp", "gptq-4bit")}, noise=5.0
    )]  # fmt: skip
    choice = only_choice(rows)
    assert choice.leader is not None
    assert choice.at_once == 2
    assert {m.subject for m in choice.preferred} == {choice.leader.subject}


def test_what_is_shown_to_be_worse_does_not_count() -> None:
    losses = {("a", "fp"): 2.0, ("a", "gptq-4bit"): 2.02, ("a", "rtn-4bit"): 2.5}
    choice = only_choice(measured(losses))
    assert (choice.at_once, choice.contenders) == (1, ())


def test_under_ten_documents_the_leader_ships_and_all_candidates_count() -> None:
    losses = {("a", "fp"): 2.0, ("a", "gptq-4bit"): 2.02, ("a", "rtn-4bit"): 2.5}
    rows = [replace(m, evidence=of_first(m.evidence, 9)) for m in measured(losses)]
    choice = only_choice(
        [replace(m, bits_per_weight=3.0) if m.scheme == "rtn-4bit" else m for m in rows]
    )
    assert [m.scheme for m in choice.preferred] == ["gptq-4bit"]
    assert choice.at_once == 2


@pytest.mark.parametrize("objective", [Objective("kl"), Objective("bits", margin=0.05)])
def test_other_objectives_count_all_candidates(objective: Objective) -> None:
    losses = {("a", "fp"): 2.0, ("a", "gptq-4bit"): 2.02, ("a", "rtn-4bit"): 2.03}
    losses |= {("b", q): 3.0 for q in ("fp", "gptq-4bit")}
    rows = [m if m.scheme == "fp" else with_divergence(m, 0.01) for m in measured(losses)]
    of_class = 3 if objective.kind == "kl" else 5  # full precision is a candidate by bits
    assert only_choice(rows, objective).at_once == of_class


def test_means_that_a_search_tried_count() -> None:
    rows = measured({("a", "gptq-4bit"): 2.0, ("b", "gptq-4bit"): 2.5})
    (choice,) = choices(table_of(rows), searched={"a": 7})
    assert choice.at_once == 7
    (other,) = choices(table_of(rows), searched={"b": 7})
    assert other.at_once == 1


def test_a_contender_that_breaks_a_rule_does_not_ship_for_its_bits() -> None:
    rows = tied(BITS)
    kl = {"gptq-4bit": 0.5, "bnb-nf4": 0.01, "rtn-4bit": 0.01}
    rows = [m if m.scheme == "fp" else with_divergence(m, kl[m.scheme]) for m in rows]
    rules = [
        PolicyRule("four", "relative_error", 0.05, subjects=("@ships",)),
        PolicyRule("kl", "kl", 0.1, subjects=("@ships",)),
    ]
    answer, verdict = gated(rows, Policy("ours", tuple(rules)))
    assert (answer.exit_code, verdict.classes[0].scheme) == (0, "rtn-4bit")


def test_a_contender_with_fewer_bits_that_is_undecided_leaves_it_to_one_that_passes() -> None:
    swing = np.where(np.arange(60) % 2, 60.0, -60.0)
    rows = [
        sample.with_loss(m, m.evidence.nll_sum + swing) if m.scheme == "gptq-4bit" else m
        for m in tied(BITS)
    ]
    rule = PolicyRule("four", "relative_error", 0.05, subjects=("@ships",))
    _, verdict = gated(rows, Policy("ours", (rule,)))
    (only,) = verdict.classes
    assert (only.status, only.scheme, only.at_once) == ("ship", "rtn-4bit", 3)
    # Where none passes, the fewest bits are undecided.
    strict = replace(rule, margin=0.0)
    _, verdict = gated(rows, Policy("ours", (strict,)))
    assert (verdict.classes[0].status, verdict.classes[0].scheme) == ("undecided", "gptq-4bit")


def test_where_the_leader_breaks_a_rule_another_subject_is_named_and_does_not_ship() -> None:
    losses = {
        ("a", "fp"): 1.9,
        ("a", "gptq-4bit"): 2.0,
        ("b", "fp"): 2.0,
        ("b", "gptq-4bit"): 2.001,
    }
    rule = PolicyRule("four", "relative_error", 0.02, subjects=("@ships",))
    _, verdict = gated(measured(losses, noise=2.0, seed=1), Policy("ours", (rule,)))
    (only,) = verdict.classes
    assert (only.subject, only.status) == ("a", "hold")
    assert only.changes[0] == "`b` at gptq-4bit, whose loss is indistinguishable, breaks no rule"


def test_a_clear_failure_is_no_matter_of_documents_and_few_never_pass() -> None:
    for error, exit_code, status in ((0.2, 1, "hold"), (0.0001, 3, "undecided")):
        rows = [
            replace(m, evidence=of_first(m.evidence, 13)) for m in of_errors({"gptq-4bit": error})
        ]
        answer, verdict = gated(rows)
        assert (answer.exit_code, verdict.classes[0].status) == (exit_code, status)


def test_classes_do_not_pay_for_each_other() -> None:
    alone, _ = gated(of_errors({"gptq-4bit": 0.01}))
    both, _ = gated(of_errors({"gptq-4bit": 0.01, "bnb-int8": 0.001}))
    intervals = [next(c.interval for c in g.checks if c.name == "four-bit") for g in (alone, both)]
    assert intervals[0] == intervals[1]


def test_the_upper_end_reaches_as_far_as_a_quarter_of_the_contenders_do() -> None:
    draw = np.random.default_rng(0)
    rows = measured({("s0", "fp"): 2.0, ("s0", "gptq-4bit"): 2.02}, noise=0.0)
    subjects = [f"s{k}" for k in range(8)]
    every = []
    for k, name in enumerate(subjects):
        for m in rows:
            own = 0.001 if k == 0 else 8.0  # the first looks quiet
            noise = own * draw.standard_normal(60) - 1.5 * (k == 0) if m.scheme != "fp" else 0.0
            evidence = replace(m.evidence, nll_sum=m.evidence.nll_sum + noise)
            every.append(replace(m, subject=name, evidence=evidence))
    choice = only_choice(every)
    assert choice.at_once > 4
    assert choice.ranked[0].subject == "s0"
    rule = PolicyRule("four", "relative_error", 0.05, subjects=("@ships",))
    (check,) = gated(every, Policy("ours", (rule,)))[0].checks
    assert check.interval is not None
    full = {m.subject: m.evidence.nll_sum for m in every if m.scheme == "fp"}
    reaches = sorted(
        interval.high - interval.estimate
        for label, scheme in choice.cells
        for interval in [statistics.relative_error(
            next(m.evidence.nll_sum for m in every if (m.subject, m.scheme) == (label, scheme)),
            full[label], 1 - 0.05 / choice.at_once,
        )]
    )  # fmt: skip
    least = reaches[(choice.at_once - 1) // 4]
    assert check.interval.high - check.interval.estimate == pytest.approx(least, rel=1e-9)


# ------------------------------------------------------------------------------- KL divergence


def with_divergence(measured: Measurement, kl: float) -> Measurement:
    tokens = measured.evidence.tokens
    own = np.random.default_rng([*measured.scheme.encode()])
    sums = kl * tokens * np.exp(0.1 * own.standard_normal(len(tokens)))
    none = np.zeros((len(tokens), 1), dtype=np.int64)
    fidelity = Fidelity(sums, sums, none, tokens, sums)
    return replace(measured, evidence=replace(measured.evidence, fidelity=fidelity))


def test_by_divergence_the_scheme_is_chosen_and_not_the_subject_that_learned_least() -> None:
    losses = {
        ("early", "gptq-4bit"): 3.0, ("late", "gptq-4bit"): 2.0, ("late", "bnb-nf4"): 2.001,
    }  # fmt: skip
    kl = {"gptq-4bit": 0.02, "bnb-nf4": 0.01}
    rows = [
        with_divergence(m, 0.001 if m.subject == "early" else kl[m.scheme])
        for m in measured(losses)
    ]
    (only,) = shipped(table_of(rows), Objective("kl"))
    assert (only.subject, only.scheme, only.runner_up_scheme) == ("late", "bnb-nf4", "gptq-4bit")
    assert only.kl is not None
    assert only.kl.estimate == pytest.approx(0.01, rel=0.1)
    assert only.lead is not None
    assert only.lead.estimate == pytest.approx(-0.01, rel=0.2)


def test_below_five_thousandths_of_a_nat_divergence_does_not_rank() -> None:
    losses = {("a", "bnb-int8"): 2.0, ("a", "rtn-8bit"): 2.001}

    def chosen(kl: dict[str, float]) -> ClassVerdict:
        rows = [with_divergence(m, kl[m.scheme]) for m in measured(losses)]
        (only,) = shipped(table_of(rows), Objective("kl"))
        return only

    near = chosen({"bnb-int8": 0.001, "rtn-8bit": 0.004})
    assert near.lead is not None
    assert near.lead.high < 0
    assert near.contenders == ("a at rtn-8bit",)
    assert chosen({"bnb-int8": 0.001, "rtn-8bit": 0.02}).contenders == ()


def test_without_divergences_nothing_is_chosen_by_them() -> None:
    (only,) = shipped(table_of(measured({("a", "gptq-4bit"): 2.0})), Objective("kl"))
    assert only.subject is None


def test_the_sample_has_one_line_for_each_class() -> None:
    table = Measurements.of(sample.series(), sample.measurements(), 0.95)
    assert [(one.bit_class, one.scheme) for one in shipped(table)] == [
        ("8", "bnb-int8"), ("4", "gptq-4bit"), ("3", "gptq-3bit"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------- under a policy


def gated(
    rows: list[Measurement], policy: Policy | None = None, bits: tuple[str, ...] = ()
) -> tuple[Gate, Verdict]:
    answer = gate(policy or preset("release"), GateInput(table_of(rows), bits=bits), today=TODAY)
    return answer, verdict_of(answer, "loss")


def of_errors(errors: dict[str, float], subject: str = "a") -> list[Measurement]:
    """Return one subject whose schemes add these parts to its loss."""
    losses = {(subject, q): 2.0 * (1 + error) for q, error in {"fp": 0.0, **errors}.items()}
    return measured(losses, noise=0.001)


def told(verdict: Verdict) -> list[tuple[str, str, str]]:
    return [(one.bit_class, one.level, one.status) for one in verdict.classes]


def test_release_covers_eight_four_and_three_bits() -> None:
    rows = of_errors({"bnb-int8": 0.001, "gptq-4bit": 0.01, "gptq-3bit": 0.2})
    answer, verdict = gated(rows)
    assert told(verdict) == [("8", "error", "ship"), ("4", "error", "ship"), ("3", "warn", "hold")]
    assert (answer.exit_code, verdict.status) == (0, "ship")
    three = verdict.classes[-1]
    assert (three.rule, three.margin, three.unit) == ("three-bit", 0.08, "fraction")
    assert three.relative_error is not None
    assert three.relative_error.low > 0.08
    assert "the margin is 8 %" in three.breaches[0]


def test_a_scheme_that_does_not_ship_is_not_judged() -> None:
    answer, _ = gated(of_errors({"gptq-4bit": 0.01, "rtn-4bit": 0.3}))
    assert answer.exit_code == 0
    assert {check.scheme for check in answer.checks} == {"gptq-4bit"}


def test_a_class_that_was_not_measured_is_asked_for_by_name_alone() -> None:
    rows = of_errors({"gptq-4bit": 0.01})
    assert gated(rows)[0].exit_code == 0
    answer, verdict = gated(rows, bits=("8", "4"))
    assert told(verdict) == [("8", "error", "incomplete"), ("4", "error", "ship")]
    assert (answer.exit_code, verdict.status) == (3, "incomplete")
    assert verdict.classes[0].needs == ("scan again with a scheme of 8 bits in `--schemes`",)
    answer, verdict = gated(rows, bits=("3",))  # which only warns unless it is named
    assert told(verdict) == [("3", "error", "incomplete")]
    assert (answer.exit_code, verdict.status) == (3, "incomplete")


def test_where_no_class_that_counts_was_measured_the_answer_is_incomplete() -> None:
    answer, verdict = gated(of_errors({"gptq-3bit": 0.01}))
    assert (answer.verdict, verdict.status) == ("incomplete", "incomplete")
    assert "nothing was measured at 8 or 4 bits" in verdict.others[0]


def test_a_class_that_is_not_asked_for_changes_no_answer() -> None:
    rows = of_errors({"gptq-4bit": 0.01, "rtn-6bit": 0.3})
    answer, verdict = gated(rows)
    assert told(verdict) == [("6", "off", "unjudged"), ("4", "error", "ship")]
    assert (answer.exit_code, verdict.status) == (0, "ship")
    assert verdict.classes[0].needs == ()


def test_a_class_that_the_command_names_and_no_rule_covers_is_inconclusive() -> None:
    answer, verdict = gated(of_errors({"gptq-4bit": 0.01, "rtn-6bit": 0.3}), bits=("6", "4"))
    assert told(verdict) == [("6", "error", "undecided"), ("4", "error", "ship")]
    assert (answer.exit_code, verdict.status) == (3, "undecided")


def test_a_class_that_no_rule_covers_is_undecided() -> None:
    rules = tuple(r for r in preset("release").rules if r.name != "four-bit")
    answer, verdict = gated(of_errors({"gptq-4bit": 0.01}), replace(preset("release"), rules=rules))
    assert (answer.exit_code, told(verdict)) == (3, [("4", "error", "undecided")])
    (check,) = answer.of("inconclusive")
    assert (check.rule, check.scheme) == ("QA040", "gptq-4bit")
    off = replace(preset("release"), rules=rules, classes={"8": "error"})
    answer, verdict = gated(of_errors({"gptq-4bit": 0.01, "bnb-int8": 0.0}), off)
    assert (answer.exit_code, told(verdict)[1]) == (0, ("4", "off", "unjudged"))


@pytest.mark.parametrize("classes", [{"4": "off"}, {"8": "off"}, {"8": "warn"}])
def test_a_rule_about_what_ships_that_no_class_is_left_for_is_not_a_pass(
    classes: dict[str, Level],
) -> None:
    rule = PolicyRule("x", "relative_error", 0.02, subjects=("@ships",))
    policy = Policy("ours", (rule,), classes=classes)
    answer, verdict = gated(of_errors({"gptq-4bit": 0.3}), policy)
    assert (answer.exit_code, verdict.status) == (3, "incomplete")
    assert "leaves out 4 bits" in verdict.others[0]
    both = {"gptq-4bit": 0.3, "bnb-int8": 0.001}
    answer, _ = gated(of_errors(both), replace(policy, classes={"4": "off", "8": "error"}))
    assert answer.exit_code == 0
    answer, _ = gated(of_errors(both), replace(policy, rules=(replace(rule, level="warn"),)))
    assert answer.exit_code == 0


def test_a_rule_on_the_pick_covers_what_ships_of_its_class() -> None:
    plain = Policy("old", (PolicyRule("four", "relative_error", 0.02, schemes=("*-4bit",)),))
    rows = of_errors({"gptq-4bit": 0.01, "rtn-4bit": 0.3, "gptq-3bit": 0.1})
    answer, verdict = gated(rows, plain)
    assert {check.scheme for check in answer.checks} == {"gptq-4bit", "rtn-4bit"}
    assert told(verdict) == [("4", "error", "ship"), ("3", "off", "unjudged")]
    # Another error of the policy, that of a scheme that does not ship, decides beside the classes.
    assert (answer.exit_code, verdict.status) == (1, "hold")
    assert "rtn-4bit raises the loss" in verdict.others[0]


def test_what_a_class_of_no_finite_loss_has_is_a_breach() -> None:
    rows = of_errors({"gptq-4bit": float("nan")})
    answer, verdict = gated(rows)
    assert (answer.exit_code, told(verdict)) == (1, [("4", "error", "hold")])
    assert verdict.classes[0].subject is None


@pytest.mark.parametrize(("kl", "outcome"), [(0.01, "pass"), (0.2, "fail"), (None, "missing")])
def test_rules_of_divergence_warn_and_never_decide(kl: float | None, outcome: str) -> None:
    rows = of_errors({"gptq-4bit": 0.01})
    if kl is not None:
        rows = [m if m.scheme == "fp" else with_divergence(m, kl) for m in rows]
    rules = [r for r in preset("release").rules if r.name in ("four-bit", "four-bit-kl")]
    answer, verdict = gated(rows, replace(preset("release"), rules=tuple(rules)))
    assert {c.metric: c.outcome for c in answer.checks} == {"relative_error": "pass", "kl": outcome}
    assert (answer.exit_code, verdict.classes[0].status) == (0, "ship")
    assert bool(verdict.classes[0].warnings) == (outcome != "pass")


def test_the_worst_stratum_decides_where_a_rule_asks_for_it() -> None:
    rows = of_errors({"gptq-4bit": 0.01})
    strata = tuple("code" if k % 6 < 2 else "prose" for k in range(60))
    harm = np.where(np.array(strata) == "code", 1.05, 1.0)

    def grouped(m: Measurement) -> Measurement:
        nll = m.evidence.nll_sum * (1.0 if m.scheme == "fp" else harm)
        return replace(m, evidence=replace(m.evidence, strata=strata, nll_sum=nll))

    rule = PolicyRule("worst", "relative_error", 0.04, subjects=("@ships",), strata="worst")
    for asked, outcome in ((rule, "fail"), (replace(rule, strata=None), "pass")):
        answer, _ = gated([grouped(m) for m in rows], Policy("p", (asked,)))
        assert [check.outcome for check in answer.checks] == [outcome]
    assert gated(rows, Policy("p", (rule,)))[0].checks[0].outcome == "missing"


LEVELS = st.sampled_from(["error", "warn", "off"])
ERRORS = st.sampled_from([0.0, 0.004, 0.019, 0.021, 0.08, 0.3, float("nan")])
SELECTORS = st.sampled_from([("@ships",), ("@pick",), ("@all",), ("@ships", "a")])


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    rules = tuple(
        PolicyRule(
            name=f"r{k}",
            metric="relative_error",
            margin=draw(st.sampled_from([0.005, 0.02, 0.08])),
            level=draw(LEVELS),
            subjects=draw(SELECTORS),
            bits=draw(st.sampled_from([(), ("4",), ("8", "3")])),
        )
        for k in range(draw(st.integers(1, 3)))
    )
    classes = draw(st.dictionaries(st.sampled_from(["8", "4", "3", "2"]), LEVELS))
    ignored = draw(st.booleans())
    ignores = (Ignore("r0", "known", TODAY),) if ignored else ()
    return Policy("drawn", rules, ignores, classes=classes)


@given(policies(), st.dictionaries(st.sampled_from(SCHEMES), ERRORS, min_size=1), st.integers(0, 3))
def test_the_verdict_and_the_gate_have_one_answer(
    policy: Policy, errors: dict[str, float], seed: int
) -> None:
    """Whatever is measured, and whatever the policy asks for."""
    losses = {(s, "fp"): 2.0 + k for k, s in enumerate(("a", "b"))}
    losses |= {(s, q): losses[s, "fp"] * (1 + e) for q, e in errors.items() for s in ("a", "b")}
    answer, verdict = gated(measured(losses, seed=seed), policy)
    exits = {"ship": 0, "hold": 1, "undecided": 3, "incomplete": 3}
    assert exits[verdict.status] == answer.exit_code
    statuses = {one.status for one in verdict.classes if one.level == "error"}
    for one in verdict.classes:  # an error of a class is an error of the gate
        assert one.level != "error" or one.status == "ship" or answer.exit_code != 0
        assert one.status != "hold" or one.level != "error" or answer.exit_code == 1
    # What no class accounts for is among the others.
    assert verdict.status in (statuses | {"ship"}) or verdict.others


def test_sure_tokens_that_changed_are_judged_by_their_share_of_sure_tokens() -> None:
    rows = of_errors({"gptq-4bit": 0.01})
    tokens = rows[0].evidence.tokens
    draw = np.random.default_rng(0)
    counts = np.stack([tokens - 45, np.full_like(tokens, 20), tokens * 0 + 15, tokens * 0 + 10], 1)
    flips = np.stack([tokens * 0 + 20, tokens * 0 + 5, draw.integers(0, 2, 60), tokens * 0], 1)
    sums = ByConfidence(counts, counts * 0.01, flips)

    def with_sums(m: Measurement, sums: ByConfidence = sums) -> Measurement:
        quantized = with_divergence(m, 0.02)
        assert quantized.evidence.fidelity is not None
        fidelity = replace(quantized.evidence.fidelity, by_confidence=sums)
        return replace(quantized, evidence=replace(quantized.evidence, fidelity=fidelity))

    rule = PolicyRule("sure", "sure_top1", 0.05, subjects=("@ships",), bits=("4",))
    policy = replace(preset("release"), rules=(rule,), classes={})
    answer, _ = gated([m if m.scheme == "fp" else with_sums(m) for m in rows], policy)
    (check,) = answer.checks
    assert check.interval is not None
    assert check.interval.estimate == pytest.approx(flips[:, 2].sum() / (60 * 25))
    assert check.outcome == "pass"
    answer, _ = gated([m if m.scheme == "fp" else with_divergence(m, 0.02) for m in rows], policy)
    assert [check.outcome for check in answer.checks] == ["missing"]
    counts[:, 1] += counts[:, 2:].sum(1)
    unsure = ByConfidence(counts * [1, 1, 0, 0], sums.kl_sum, flips * [1, 1, 0, 0])
    answer, _ = gated([m if m.scheme == "fp" else with_sums(m, unsure) for m in rows], policy)
    (check,) = answer.checks
    assert check.outcome == "missing"
    assert "gives no token of these documents at least 0.5" in check.message
