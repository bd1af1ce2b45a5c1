"""Candidates of searches that no pass measures, as passes of their own."""

from __future__ import annotations

from benchmarks.cut import checkpoint
from qaudit.core.registry import parse_scheme
from qaudit.planning.passes import candidates_of
from qaudit.types import GREEDY, Checkpoint, Pass, Price, Subject

SPECS = tuple(parse_scheme(f"rtn-{bits}bit:group=16").spec for bits in (3, 4))
SERIES = [checkpoint(n, 100 + n) for n in range(4)]


def alone(one: Checkpoint) -> Subject:
    return Subject(one.label, ((one, 1.0),))


def search(label: str, *members: Checkpoint, scheme: str = SPECS[1]) -> Pass:
    shares = tuple((one, 1 / len(members)) for one in members)
    price = Price(flops=60.0, nbytes_read=1, streams=6)
    return Pass(Subject(label, shares, f"{GREEDY}:scheme={scheme}"), SPECS, price=price)


def test_only_what_no_pass_measures_is_a_candidate_and_each_once() -> None:
    found = search("best", *SERIES[:3])
    again = search("again", *SERIES[1:])
    passes = [Pass(alone(SERIES[0]), SPECS), found, again]
    candidates = candidates_of(passes)
    assert [one.subject for one in candidates] == [alone(one) for one in SERIES[1:]]
    assert {one.schemes for one in candidates} == {(SPECS[1],)}  # that of the search alone
    assert not any(one.full_precision or one.draw for one in candidates)
    assert candidates[0].price == Price(flops=20.0, nbytes_read=101, streams=2)


def test_passes_of_further_draws_and_perturbed_ones_measure_no_candidate() -> None:
    others = [
        Pass(alone(SERIES[0]), SPECS, draw=1),
        Pass(alone(SERIES[0]), SPECS, perturbed=True),
    ]
    candidates = candidates_of([*others, search("best", *SERIES[:2])])
    assert [one.subject.label for one in candidates] == [one.label for one in SERIES[:2]]


def test_the_same_checkpoint_at_two_schemes_is_two_candidates() -> None:
    some = SERIES[:2]
    candidates = candidates_of([search("a", *some), search("b", *some, scheme=SPECS[0])])
    assert [one.schemes for one in candidates] == [(s,) for s in reversed(SPECS) for _ in some]


def test_a_plan_without_a_search_has_none() -> None:
    assert candidates_of([Pass(alone(one), SPECS) for one in SERIES]) == ()
