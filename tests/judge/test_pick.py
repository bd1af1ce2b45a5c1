"""What to ship by the user's objective, and what may be as good."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qaudit.core.registry import parse_scheme
from qaudit.errors import UsageError
from qaudit.judge.choose import LOSS, Objective, parse_objective
from qaudit.judge.gate import GateInput
from qaudit.judge.table import Measurements
from qaudit.types import Checkpoint, Evidence, Pick, Ref, Subject
from tests.support import sample
from tests.support.measured import measurement

LADDER = {
    "fp": 16.0, "bnb-int8": 8.0, "gptq-4bit": 4.25, "awq-4bit": 4.25, "rtn-4bit": 4.25,
    "gptq-3bit": 3.25,
}  # fmt: skip


def choose(table: Measurements, objective: Objective = LOSS) -> Pick:
    pick = GateInput(table, objective=objective).pick
    assert pick is not None
    return pick


def drawn(
    losses: dict[tuple[str, str], float], bits: dict[str, float], seed: int = 0
) -> Measurements:
    """Return measurements whose losses differ by constants: what wins is known."""
    draw = np.random.default_rng(seed)
    tokens = np.full(60, 100)
    base = np.exp(0.2 * draw.standard_normal(60)) * tokens
    shas = tuple(map(str, range(60)))
    found = []
    for (subject, scheme), loss in losses.items():
        nll = base * loss + draw.standard_normal(60) * 0.01
        evidence = Evidence(shas, nll, tokens, tokens * 4)
        found.append(measurement(subject, scheme, scheme, evidence, bits[scheme]))
    names = dict.fromkeys(subject for subject, _ in losses)
    subjects = tuple(Subject(n, ((Checkpoint(Ref(n), n), 1.0),)) for n in names)
    return Measurements.of(subjects, found, 0.95)


# -------------------------------------------------------------------------------- objectives


def test_an_objective_is_read_and_printed() -> None:
    for text, expected in {
        "loss": Objective(),
        "loss@awq-3bit": Objective("loss", scheme="awq-3bit"),
        "kl": Objective("kl"),
        "bits@1%": Objective("bits", margin=0.01),
        "bits@0.005": Objective("bits", margin=0.005),
    }.items():
        assert parse_objective(text) == parse_objective(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("los", "no objective `los`"),
        ("loss@", "no objective `loss@`"),
        ("kl@rtn-4bit", "no objective `kl@rtn-4bit`"),
        ("bits", "has no margin in percent"),
        ("bits@1nat", "has no margin in percent"),
        ("bits@200%", "not between 0 and 100 %"),
        ("bits@0", "not between 0 and 100 %"),
    ],
)
def test_what_is_no_objective_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_objective(text)


# ------------------------------------------------------------------------------- lowest loss


def test_another_name_of_the_winner_is_not_its_runner_up() -> None:
    found = drawn({("a", "rtn-4bit"): 2.0, ("b", "rtn-4bit"): 2.1}, LADDER)
    twin = replace(found.measurements[0], subject="main")
    subjects = (*found.subjects, Subject("main", ((Checkpoint(Ref("main"), "main"), 1.0),)))
    pick = choose(Measurements.of(subjects, (*found.measurements, twin), 0.95))
    assert (pick.subject, pick.runner_up) == ("a", "b")
    assert "main" not in pick.contenders


def test_of_many_that_are_equal_nearly_all_are_contenders() -> None:
    for seed in range(10):
        losses = {(f"s{k}", scheme): 2.0 for k in range(12) for scheme in ("fp", "rtn-4bit")}
        pick = choose(drawn(losses, {"fp": 16.0, "rtn-4bit": 4.25}, seed))
        assert len(pick.contenders) >= 9


def test_what_would_change_the_answer_is_said() -> None:
    losses = {
        ("a", "fp"): 2.1, ("b", "fp"): 2.0,
        ("a", "gptq-4bit"): 2.12, ("b", "gptq-4bit"): 2.2,
        ("a", "gptq-3bit"): 2.4, ("b", "gptq-3bit"): 2.3,
    }  # fmt: skip
    pick = choose(drawn(losses, LADDER))
    assert pick.subject == "a"
    assert pick.changes == ("in full precision it would be `b`",)
    pick = choose(Measurements.of(sample.series(), sample.measurements(), 0.95))
    assert pick.subject == "soup"
    assert any(change.startswith("without soups it would be `stage2-") for change in pick.changes)
    assert f"without {pick.scheme} it would be `soup` at awq-4bit" in pick.changes


@pytest.mark.parametrize(("bits", "chosen"), [(3.4, "gptq-mix"), (3.6, "rtn-3bit")])
def test_a_mixture_competes_where_it_is_no_larger_than_a_file_of_one_width(
    bits: float, chosen: str
) -> None:
    name = "gptq-mix:budget=3.5"
    found = drawn(
        {("a", "rtn-3bit"): 2.2, ("a", "awq-3bit"): 2.3, ("a", name): 2.0},
        {"rtn-3bit": 3.5, "awq-3bit": 3.25, name: bits},
    )
    measured = tuple(
        replace(m, mixture={"w": "34"} if m.scheme == name else {}) for m in found.measurements
    )
    pick = choose(Measurements.of(found.subjects, measured, 0.95))
    assert pick.scheme.startswith(chosen)
    left_out = (
        f"`a` at {name} is no candidate: its 3.60 bits per weight are more than 3.50, the most"
    )
    assert any(left_out in change for change in pick.changes) == (bits == 3.6)
    alone = Measurements.of(found.subjects, measured[2:], 0.95)
    assert choose(alone) is not None


def test_the_class_of_a_mixture_is_that_of_its_whole_bits() -> None:
    for budget, expected in (("3", "3"), ("3.75", "3"), ("4.25", "4")):
        scheme = parse_scheme(f"gptq-mix:budget={budget}:members=248")
        assert scheme.class_at(float(budget) - 0.01) == scheme.bit_class == expected
        assert "bit" not in scheme.short.removeprefix(
            "gptq-mix"
        )  # policies' patterns are of widths


# ------------------------------------------------------------------------------- fewest bits


def ladder(**losses: float) -> Measurements:
    named = {("x0", scheme.replace("_", "-")): loss for scheme, loss in losses.items()}
    return drawn(named, LADDER)


def test_the_fewest_bits_within_the_margin_are_taken() -> None:
    found = ladder(fp=2.0, bnb_int8=2.001, gptq_4bit=2.03, awq_4bit=2.02, gptq_3bit=2.2)
    near, wide = (choose(found, Objective("bits", margin=margin)) for margin in (0.005, 0.05))
    assert (near.scheme, near.reference) == ("bnb-int8", "x0")
    assert wide.scheme == "awq-4bit"  # the better of two at one price
    assert wide.changes[0].startswith("within 10 % it would be `x0` at gptq-3bit (3.25 bits)")
    pick = choose(ladder(fp=2.0, gptq_4bit=2.2), Objective("bits", margin=0.001))
    assert pick.scheme == "fp"  # within no margin nothing but full precision is left


def test_a_poor_checkpoint_that_loses_little_does_not_come_within_the_margin() -> None:
    losses = {
        ("early", "fp"): 3.0, ("early", "gptq-3bit"): 3.001,
        ("late", "fp"): 2.0, ("late", "gptq-4bit"): 2.01,
    }  # fmt: skip
    pick = choose(drawn(losses, LADDER), Objective("bits", margin=0.02))
    assert (pick.subject, pick.scheme) == ("late", "gptq-4bit")
