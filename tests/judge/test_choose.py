"""What to ship by the user's objective, what of each bit class, and what may be as good."""

from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core import statistics
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import most_bits_first
from qaudit.errors import UsageError
from qaudit.judge.choose import LOSS, Objective, choices, parse_objective
from qaudit.judge.gate import GateInput, gate, verdict_of
from qaudit.judge.table import Measurements
from qaudit.policy import preset
from qaudit.types import (
    Checkpoint,
    Evidence,
    Fidelity,
    Ignore,
    Interval,
    Policy,
    PolicyRule,
    Ref,
    Subject,
)
from tests.support import sample
from tests.support.measured import measurement

TODAY = date(2026, 6, 15)
SCHEMES = ("bnb-int8", "gptq-4bit", "bnb-nf4", "gptq-3bit", "rtn-3bit")


LADDER = dict.fromkeys(("gptq-4bit", "awq-4bit", "rtn-4bit"), 4.25)
LADDER |= {"fp": 16.0, "bnb-int8": 8.0, "gptq-3bit": 3.25}


def measured(losses, bits=None, *, seed=0, noise=0.01):
    """Return measurements on the same 60 documents: losses differ by constants but for noise."""
    draw = np.random.default_rng(seed)
    tokens = np.full(60, 100)
    base = np.exp(0.2 * draw.standard_normal(60)) * tokens
    rows = []
    for (subject, scheme), loss in losses.items():
        own = np.random.default_rng([seed, *f"{subject} {scheme}".encode()])
        nll = base * loss + own.standard_normal(60) * noise
        evidence = Evidence(tuple(map(str, range(60))), nll, tokens, tokens * 4)
        spec = parse_scheme(scheme).spec if scheme != "fp" else "fp"
        rows.append(measurement(subject, scheme, spec, evidence, (bits or {}).get(scheme, 4.25)))
    return rows


def shipped(table, objective=LOSS, classes=()):
    return list(GateInput(table, objective=objective, bits=classes).choices)


def choose(table, objective=LOSS):
    pick = GateInput(table, objective=objective).pick
    assert pick is not None
    return pick


def table_of(rows):
    names = dict.fromkeys(sorted({m.subject for m in rows}))
    subjects = tuple(Subject(n, ((Checkpoint(Ref(n), n), 1.0),)) for n in names)
    return Measurements.of(subjects, rows, 0.95)


def test_an_objective_is_read_and_printed():
    for text, expected in {
        "loss": Objective(),
        "loss@awq-3bit": Objective("loss", scheme="awq-3bit"),
        "kl": Objective("kl"),
        "bits@1%": Objective("bits", margin=0.01),
        "bits@0.005": Objective("bits", margin=0.005),
    }.items():
        assert parse_objective(text) == parse_objective(str(expected)) == expected

    for text, sentence in {
        "los": "no objective `los`",
        "loss@": "no objective `loss@`",
        "kl@rtn-4bit": "no objective `kl@rtn-4bit`",
        "bits": "has no margin between 0 and 100 %",
        "bits@1nat": "has no margin between 0 and 100 %",
        "bits@200%": "has no margin between 0 and 100 %",
        "bits@0": "has no margin between 0 and 100 %",
    }.items():
        with pytest.raises(UsageError, match=sentence):
            parse_objective(text)


# ------------------------------------------------------------------------------- lowest loss


def test_another_name_of_the_winner_is_not_its_runner_up():
    found = measured({("a", "rtn-4bit"): 2.0, ("b", "rtn-4bit"): 2.1})
    pick = choose(table_of([*found, replace(found[0], subject="main")]))
    assert (pick.subject, pick.runner_up) == ("a", "b")
    assert "main" not in pick.contenders


def test_of_many_that_are_equal_nearly_all_are_contenders():
    for seed in range(10):
        losses = {(f"s{k}", scheme): 2.0 for k in range(12) for scheme in ("fp", "rtn-4bit")}
        pick = choose(table_of(measured(losses, LADDER, seed=seed)))
        assert len(pick.contenders) >= 9


def test_what_would_change_the_answer_is_said():
    pick = choose(Measurements.of(sample.series(), sample.measurements(), 0.95))
    assert pick.subject == "soup"
    assert any(change.startswith("without soups it would be `stage2-") for change in pick.changes)
    assert f"without {pick.scheme} it would be `soup` at awq-4bit" in pick.changes


def test_a_mixture_competes_where_it_is_no_larger_and_is_of_the_class_of_its_whole_bits():
    name = "gptq-mix:budget=3.5"
    losses = {("a", "rtn-3bit"): 2.2, ("a", "awq-3bit"): 2.3, ("a", name): 2.0}
    for bits, chosen in ((3.4, "gptq-mix"), (3.6, "rtn-3bit")):
        found = [
            replace(m, mixture={"w": "34"} if m.scheme == name else {})
            for m in measured(losses, {"rtn-3bit": 3.5, "awq-3bit": 3.25, name: bits})
        ]
        pick = choose(table_of(found))
        assert pick.scheme.startswith(chosen)
        left_out = f"`a` at {name} is no candidate: its 3.60 bits per weight are more than 3.50, "
        assert any(f"{left_out}the most" in said for said in pick.changes) == (bits == 3.6)
        assert choose(table_of(found[2:])).subject == "a"
    for budget, expected in (("3", "3"), ("3.75", "3"), ("4.25", "4")):
        scheme = parse_scheme(f"gptq-mix:budget={budget}:members=248")
        assert scheme.class_at(float(budget) - 0.01) == scheme.bit_class == expected
        assert "bit" not in scheme.short.removeprefix("gptq-mix")  # no width of a policy's pattern


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
def test_a_class_is_of_the_codes(scheme, bits, expected, calibrates):
    known = parse_scheme(scheme)
    assert (known.class_at(bits), known.calibrates) == (expected, calibrates)
    names = ["w4a4", "3", "4kv8", "w8a8", "4", "8", "w4a8"]
    assert sorted(names, key=most_bits_first) == ["8", "w8a8", "4", "4kv8", "w4a4", "w4a8", "3"]


@given(st.permutations(range(10)), st.integers(0, 5), st.sampled_from([0.0, 0.01]))
def test_the_order_of_measurements_changes_nothing(order, seed, noise):
    losses = {(s, q): 2.0 + 0.01 * (q[-4:] == "3bit") for s in ("a", "b") for q in SCHEMES}
    rows = measured(losses, seed=seed, noise=noise)  # without noise everything is a tie
    for objective in ("loss", "bits@3%"):
        wanted = parse_objective(objective)
        plain, shuffled = table_of(rows), table_of([rows[k] for k in order])
        assert shipped(shuffled, wanted) == shipped(plain, wanted)


# ------------------------------------------------------------------------------- choosing is paid


def tied(bits):
    """Return schemes of one subject that add 1 % each, alike but for noise, and their bits."""
    losses = {("a", "fp"): 2.0} | {("a", scheme): 2.02 for scheme in bits}
    return measured(losses, {"fp": 16.0, **bits}, seed=1, noise=5.0)


def of_first(evidence, count):
    columns = ("document_sha256", "nll_sum", "tokens", "nbytes")
    return replace(evidence, **{name: getattr(evidence, name)[:count] for name in columns})


def only_choice(rows, objective=LOSS):
    (choice,) = choices(table_of(rows), objective)
    return choice


BITS = {"gptq-4bit": 4.12, "bnb-nf4": 4.5, "rtn-4bit": 4.25}


def test_a_tie_goes_to_fewer_bits_and_the_bound_pays_for_all_of_it():
    rows = tied(BITS)
    (ships,) = shipped(table_of(rows))
    assert (ships.scheme, ships.at_once, len(ships.contenders)) == ("gptq-4bit", 3, 2)
    own, full = ({m.scheme: m.evidence.nll_sum for m in rows}[s] for s in ("gptq-4bit", "fp"))
    plain, paid = (statistics.relative_error(own, full, level) for level in (0.95, 1 - 0.05 / 3))
    assert ships.relative_error == Interval(plain.estimate, plain.low, paid.high)
    assert paid.high > plain.high
    kl = {"gptq-4bit": 0.02, "bnb-nf4": 0.01, "rtn-4bit": 0.03}
    equal = dict.fromkeys(BITS, 4.25)  # which go to the lower divergence
    for bits, scheme in ((BITS, "gptq-4bit"), (equal, "bnb-nf4")):
        rows = [m if m.scheme == "fp" else with_divergence(m, kl[m.scheme]) for m in tied(bits)]
        (ships,) = shipped(table_of(rows))
        assert ships.scheme == scheme


def test_a_contender_of_another_subject_or_under_ten_documents_does_not_ship_for_its_bits():
    rows = [replace(m, bits_per_weight=4.0 if m.subject == "b" else 4.5) for m in measured(
        {(s, q): 2.0 for s in ("a", "b") for q in ("fp", "gptq-4bit")}, noise=5.0
    )]  # fmt: skip
    choice = only_choice(rows)
    leader = choice.leader
    assert choice.at_once == 2
    assert {m.subject for m in choice.preferred} == {leader.subject}
    losses = {("a", "fp"): 2.0, ("a", "gptq-4bit"): 2.02, ("a", "rtn-4bit"): 2.5}
    rows = [replace(m, evidence=of_first(m.evidence, 9)) for m in measured(losses)]
    choice = only_choice(
        [replace(m, bits_per_weight=3.0) if m.scheme == "rtn-4bit" else m for m in rows]
    )
    assert [m.scheme for m in choice.preferred] == ["gptq-4bit"]
    assert choice.at_once == 2


def test_other_objectives_count_all_candidates():
    losses = {("a", "fp"): 2.0, ("a", "gptq-4bit"): 2.02, ("a", "rtn-4bit"): 2.03}
    losses |= {("b", q): 3.0 for q in ("fp", "gptq-4bit")}
    rows = [m if m.scheme == "fp" else with_divergence(m, 0.01) for m in measured(losses)]
    assert only_choice(rows, Objective("kl")).at_once == 3
    assert only_choice(rows, Objective("bits", margin=0.05)).at_once == 5  # by bits so is `fp`


def test_the_upper_end_reaches_as_far_as_a_quarter_of_the_contenders_do():
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
    found = check.interval
    sums = {(m.subject, m.scheme): m.evidence.nll_sum for m in every}
    level = 1 - 0.05 / choice.at_once
    reaches = sorted(
        interval.high - interval.estimate
        for cell in choice.cells
        for interval in [statistics.relative_error(sums[cell], sums[cell[0], "fp"], level)]
    )
    least = reaches[(choice.at_once - 1) // 4]
    assert found.high - found.estimate == pytest.approx(least, rel=1e-9)


def with_divergence(measured, kl):
    tokens = measured.evidence.tokens
    own = np.random.default_rng([*measured.scheme.encode()])
    sums = kl * tokens * np.exp(0.1 * own.standard_normal(len(tokens)))
    none = np.zeros((len(tokens), 1), dtype=np.int64)
    fidelity = Fidelity(sums, sums, none, tokens, sums)
    return replace(measured, evidence=replace(measured.evidence, fidelity=fidelity))


def gated(rows, policy=None, bits=()):
    answer = gate(policy or preset("release"), GateInput(table_of(rows), bits=bits), today=TODAY)
    return answer, verdict_of(answer, "loss")


LEVELS = st.sampled_from(["error", "warn", "off"])
ERRORS = st.sampled_from([0.0, 0.004, 0.019, 0.021, 0.08, 0.3, float("nan")])
SELECTORS = st.sampled_from([("@ships",), ("@pick",), ("@all",), ("@ships", "a")])


@st.composite
def policies(draw):
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
def test_gate_and_verdict_agree(policy, errors, seed):
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
