"""What ships of each bit class: subject and scheme together, whatever the order of the schemes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.registry import kind_of, parse_scheme
from qaudit.judge.candidates import bit_class, candidates, classes_of
from qaudit.judge.objectives import Objective, parse_objective
from qaudit.judge.table import Table
from qaudit.judge.verdict import choices
from qaudit.types import Checkpoint, Evidence, Fidelity, Measurement, Ref, Subject
from tests.support import sample

Losses = dict[tuple[str, str], float]
SCHEMES = ("bnb-int8", "gptq-4bit", "bnb-nf4", "gptq-3bit", "rtn-3bit")


def measured(losses: Losses, *, seed: int = 0, noise: float = 0.01) -> list[Measurement]:
    """Return measurements on the same 60 documents, half of them held out."""
    draw = np.random.default_rng(seed)
    tokens = np.full(60, 100)
    base = np.exp(0.2 * draw.standard_normal(60)) * tokens
    split = ("selection", "held-out") * 30
    rows = []
    for (subject, scheme), loss in losses.items():
        own = np.random.default_rng([seed, *f"{subject} {scheme}".encode()])
        nll = base * loss + own.standard_normal(60) * noise
        evidence = Evidence(tuple(map(str, range(60))), nll, tokens, tokens * 4, split)
        spec = parse_scheme(scheme).spec if scheme != "fp" else "fp"
        rows.append(Measurement(subject, scheme, spec, evidence, 4.25, 1.0))
    return rows


def table_of(rows: list[Measurement]) -> Table:
    names = dict.fromkeys(sorted({m.subject for m in rows}))
    subjects = tuple(Subject(n, ((Checkpoint(Ref(n), n), 1.0),)) for n in names)
    return Table.of(subjects, rows, 0.95)


# ------------------------------------------------------------------------------- bit classes


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("gptq-4bit", "4"),
        ("gptq:bits=3:group=64", "3"),
        ("rtn-8bit", "8"),
        ("bnb-nf4", "4"),
        ("bnb-nf4:double=true", "4"),  # a parameter that this version does not have
        ("bnb-int8:threshold=6.0", "8"),
    ],
)
def test_a_bit_class_is_that_of_the_codes(spec: str, expected: str) -> None:
    kind = kind_of(spec)
    assert kind is not None
    assert kind[1] == expected


@pytest.mark.parametrize("spec", ["fp", "exl3:bits=4", "gptq:bits=<b>", "gptq"])
def test_what_is_not_known_has_no_class_by_its_name(spec: str) -> None:
    assert kind_of(spec) is None


def test_a_scheme_of_another_version_is_classed_by_its_bits_per_weight() -> None:
    (one,) = measured({("a", "rtn-4bit"): 2.0})
    assert bit_class(replace(one, scheme="exl3", spec="exl3", bits_per_weight=3.2)) == "3"


def test_classes_have_the_most_bits_first() -> None:
    rows = measured({("a", scheme): 2.0 for scheme in reversed(SCHEMES)})
    assert classes_of(table_of(rows)) == ("8", "4", "3")


# ------------------------------------------------------------------------------- the choice


def test_subject_and_scheme_are_chosen_together() -> None:
    losses = {
        ("a", "gptq-4bit"): 2.1, ("a", "bnb-nf4"): 2.3,
        ("b", "gptq-4bit"): 2.2, ("b", "bnb-nf4"): 2.0,
    }  # fmt: skip
    (only,) = choices(table_of(measured(losses)))
    assert (only.subject, only.scheme) == ("b", "bnb-nf4")
    assert (only.runner_up, only.runner_up_scheme) == ("a", "gptq-4bit")
    assert only.confirmed_on == "30 documents that it was not chosen on"
    assert only.contenders == ()
    assert only.changes == ("without bnb-nf4 it would be `a` at gptq-4bit",)


def test_one_checkpoint_under_many_schemes_has_an_answer_for_each_class() -> None:
    losses = {
        ("a", "fp"): 2.0, ("a", "bnb-int8"): 2.001, ("a", "gptq-4bit"): 2.04,
        ("a", "bnb-nf4"): 2.06, ("a", "gptq-3bit"): 2.3, ("a", "rtn-3bit"): 2.9,
    }  # fmt: skip
    every = choices(table_of(measured(losses)))
    shipped = [(one.bit_class, one.scheme, one.runner_up_scheme) for one in every]
    assert shipped == [
        ("8", "bnb-int8", None), ("4", "gptq-4bit", "bnb-nf4"), ("3", "gptq-3bit", "rtn-3bit"),
    ]  # fmt: skip
    errors = [one.relative_error.estimate for one in every if one.relative_error]
    assert errors == pytest.approx([0.0005, 0.02, 0.15], rel=0.05)


def test_the_fourth_class_is_measured_or_named_as_absent() -> None:
    every = choices(table_of(measured({("a", "gptq-4bit"): 2.0})), classes=("4", "2"))
    assert [(one.bit_class, one.subject) for one in every] == [("4", "a"), ("2", None)]


@given(st.permutations(range(10)), st.integers(0, 5), st.sampled_from([0.0, 0.01]))
def test_the_order_of_measurements_changes_nothing(order: list[int], seed: int, noise: float):
    losses = {(s, q): 2.0 + 0.01 * (q[-4:] == "3bit") for s in ("a", "b") for q in SCHEMES}
    rows = measured(losses, seed=seed, noise=noise)  # without noise everything is a tie
    for objective in ("loss", "bits@3%"):
        wanted = parse_objective(objective)
        plain, shuffled = table_of(rows), table_of([rows[k] for k in order])
        assert choices(shuffled, wanted) == choices(plain, wanted)


# ------------------------------------------------------------------------------- draws


def drawn(rows: list[Measurement], cell: tuple[str, str], losses: list[float]) -> list[Measurement]:
    """Add further draws of a cell, each with its loss relative to the first."""
    (first,) = [m for m in rows if (m.subject, m.scheme) == cell]
    nll = first.evidence.nll_sum
    more = [
        replace(
            first, calibration_seed=k + 1, evidence=replace(first.evidence, nll_sum=nll * factor)
        )
        for k, factor in enumerate(losses)
    ]
    return [*rows, *more]


def test_further_draws_of_what_decides_do_not_change_what_decides() -> None:
    losses = {(s, "gptq-4bit"): loss for s, loss in (("a", 2.0), ("b", 2.01), ("c", 2.02))}
    rows = measured(losses)
    (only,) = choices(table_of(rows))
    assert (only.subject, only.runner_up) == ("a", "b")
    rows = drawn(rows, ("a", "gptq-4bit"), [1.05, 1.05])
    rows = drawn(rows, ("b", "gptq-4bit"), [1.02, 1.02])
    (only,) = choices(table_of(rows))
    assert (only.subject, only.runner_up, only.draws) == ("b", "a", 3)


def test_draws_that_everything_has_are_all_used() -> None:
    rows = measured({(s, "gptq-4bit"): loss for s, loss in (("a", 2.0), ("b", 2.01), ("c", 2.02))})
    for subject, factor in (("a", 1.2), ("b", 1.2), ("c", 1.0)):
        rows = drawn(rows, (subject, "gptq-4bit"), [factor])
    assert candidates(table_of(rows), "4")[0].subject == "c"


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
    (only,) = choices(table_of(rows), Objective("kl"))
    assert (only.subject, only.scheme, only.runner_up_scheme) == ("late", "bnb-nf4", "gptq-4bit")
    assert only.kl is not None
    assert only.kl.estimate == pytest.approx(0.01, rel=0.1)
    assert only.lead is not None
    assert only.lead.estimate == pytest.approx(-0.01, rel=0.2)
    assert only.confirmed_on is not None


def test_without_divergences_nothing_is_chosen_by_them() -> None:
    (only,) = choices(table_of(measured({("a", "gptq-4bit"): 2.0})), Objective("kl"))
    assert only.subject is None


def test_the_sample_has_one_line_for_each_class() -> None:
    table = Table.of(sample.series(), sample.halves(sample.measurements()), 0.95)
    assert [(one.bit_class, one.scheme) for one in choices(table)] == [
        ("8", "bnb-int8"), ("4", "gptq-4bit"), ("3", "gptq-3bit"),
    ]  # fmt: skip
