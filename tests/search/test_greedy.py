"""A greedy search as a pure function, against the algorithm written down plainly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.registry import parse_schemes
from qaudit.errors import UsageError
from qaudit.executors.measuring import greedy, loss_per_token
from qaudit.planning.price import Pricing, flops, passes_of, scheme_of, with_scheme
from qaudit.planning.sizes import Load, Sizes, TextSize
from qaudit.saved.codec import encode
from qaudit.types import Checkpoint, Evidence, Price, Protocol, Ref, Subject, WeightFile

Loss = Callable[[tuple[str, ...]], float]


def table(**losses: float) -> Loss:
    """Return a loss by the names of the members, in order: `AB=1.0`."""
    return lambda members: losses["".join(members)]


def plainly(candidates: list[str], loss: Loss) -> set[str]:
    """Return who goes in, as the paper's first algorithm has it."""
    ranked = sorted(candidates, key=lambda one: loss((one,)))
    ingredients = {ranked[0]}
    for candidate in ranked[1:]:
        now = loss(tuple(c for c in candidates if c in ingredients))
        tried = loss(tuple(c for c in candidates if c in {*ingredients, candidate}))
        if tried < now:
            ingredients.add(candidate)
    return ingredients


def test_the_next_best_goes_in_only_if_the_mean_gets_better() -> None:
    found = greedy("ABC", table(A=3.0, B=1.0, C=2.0, BC=1.5, AB=0.9))
    assert [candidate.label for candidate in found.candidates] == ["B", "C", "A"]
    trials = [(t.added, t.loss, t.taken) for t in found.trials]
    assert trials == [("C", 1.5, False), ("A", 0.9, True)]
    assert (found.members, found.loss) == (("A", "B"), 0.9)
    for losses, ranking, members in (
        ({"A": 1.0, "B": 2.0, "AB": 1.0}, "AB", "A"),  # only as good
        ({"A": 1.0, "B": 2.0, "AB": math.nan}, "AB", "A"),
        ({"A": 2.0, "B": 1.0, "C": 1.0, "BC": 0.5, "ABC": 0.4}, "BCA", "ABC"),  # equals as named
        ({"A": math.nan, "B": 1.0, "C": math.inf}, "BAC", "B"),  # broken ones: never averaged
    ):
        found = greedy(sorted({*"".join(losses)}), table(**losses))
        assert "".join(candidate.label for candidate in found.candidates) == ranking
        assert ("".join(found.members), found.loss) == (members, losses[members])


@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_it_takes_whom_the_plain_algorithm_takes(seed: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    places = {name: generator.normal(size=3) for name in "ABCDEF"[:count]}

    def loss(members: tuple[str, ...]) -> float:
        return float(np.square(np.mean([places[m] for m in members], axis=0)).sum())

    asked: list[tuple[str, ...]] = []

    def counted(members: tuple[str, ...]) -> float:
        asked.append(members)
        return loss(members)

    found = greedy(list(places), counted)
    assert set(found.members) == plainly(list(places), loss)
    assert found.loss == loss(found.members) <= (found.candidates[0].loss or 0)
    assert len(asked) == len(set(asked)) == 2 * count - 1


# ------------------------------------------------------------------------------------- the wiring


def checkpoint(name: str, nbytes: int = 10) -> Checkpoint:
    return Checkpoint(Ref(name), name, (WeightFile("w", nbytes, name),))


def search(*names: str, merge: str = "greedy") -> Subject:
    return Subject("best", tuple((checkpoint(n), 1 / len(names)) for n in names), merge)


def alone(name: str) -> Subject:
    return Subject(name, ((checkpoint(name), 1.0),))


def test_a_search_looks_at_what_is_asked_for_or_picked_by_default_if_it_is_measured() -> None:
    for merge, schemes, expected in (
        ("greedy", "rtn-3bit,gptq-4bit", "gptq-4bit"),
        ("greedy", "rtn-3bit,gptq-3bit", "gptq-3bit"),  # the first by name, in any order
        ("greedy:scheme=gptq:bits=3", "rtn-3bit,gptq-3bit", "gptq-3bit"),
    ):
        measured = parse_schemes([schemes])
        assert scheme_of(search("A", "B", merge=merge), measured).short == expected
        settled = with_scheme(search("A", "B", merge=merge), measured)
        assert settled.is_search
        assert scheme_of(settled, measured[::-1]).short == expected
    with pytest.raises(UsageError, match="searched for at `gptq-2bit`, which is not") as refused:
        scheme_of(search("A", "B", merge="greedy:scheme=gptq-2bit"), parse_schemes(["rtn-4bit"]))
    assert "--schemes rtn-4bit,gptq-2bit" in refused.value.hint


def test_a_search_costs_every_mean_and_every_candidate_by_itself_and_trials_no_rollouts() -> None:
    schemes = parse_schemes(["rtn-4bit,gptq-4bit"])
    sizes = Sizes(1000, 2, 300, 400, 10, 20, 40)
    text = TextSize.bound(Protocol(context=32))
    pricing = Pricing(sizes, text, Price())
    (shipped,) = parse_schemes(["gptq-4bit"])
    each = flops(sizes, Load.of([shipped], text))  # full precision beside it
    for subjects, streams, nbytes_read in (
        ([alone("A"), alone("B")], 0, 0),
        ([alone("A"), alone("B"), search("A", "B")], 6, 10 + 10 + 20),
        ([alone("A"), search("A", "B", "C")], 10, 10 + 10 + 10 + 20 + 30),
    ):
        passes = passes_of(subjects, schemes, 1, pricing)
        searches = [one for one in passes if one.subject.is_search]
        read = sum(c.nbytes for one in searches for c, _ in one.subject.members)
        price = sum((one.price for one in searches), Price())
        assert price.streams - 3 * len(searches) == streams
        assert price.nbytes_read - read == nbytes_read
        alike = price.flops - pricing.flops(schemes) * len(searches)
        assert alike == pytest.approx(streams / 2 * each)
    plain, whole = TextSize(64, 64, 32), TextSize(64, 64 + 999, 32, rollout_tokens=999)
    prices = [Pricing(sizes, text, Price()) for text in (plain, whole)]
    assert prices[0].flops(schemes) == prices[1].flops(schemes)
    assert prices[0].flops(schemes, items=True) < prices[1].flops(schemes, items=True)


def test_what_is_kept_is_plain_json_and_all_documents_choose() -> None:
    row = greedy("ABC", table(A=math.nan, B=2.0, C=1.0, BC=0.5))
    row = replace(row, label="best", scheme="gptq-3bit", documents=7, further=True)
    losses = {"C": 1.0, "B": 2.0, "A": None}
    assert json.loads(json.dumps(encode(row), allow_nan=False)) == {
        "label": "best", "scheme": "gptq-3bit", "spec": "", "documents": 7,
        "candidates": [{"label": name, "loss": loss} for name, loss in losses.items()],
        "trials": [{"added": "B", "loss": 0.5, "taken": True}],
        "members": ["B", "C"], "loss": 0.5, "further": True,
    }  # fmt: skip
    # Documents that judge are flattered by every mean that was tried on them.
    assert (row.counted, replace(row, further=False).counted) == (0, 1)
    tokens = np.array([4, 2, 0, 2])
    nll = np.array([8.0, 2.0, 0.0, 6.0])
    assert loss_per_token(Evidence(("a", "b", "c", "d"), nll, tokens, tokens)) == 2.0
