"""Whole series by name, as public repositories have them: each name placed, each in its order."""

from __future__ import annotations

import random

import pytest

from tests.support.names import family_of, names_of, recorded

REPOS = recorded()

# What no number orders: their families place them by name, or not at all.
NAMED = {"main", "it-mid-training", "it-SFT", "it-soup-APO", "it-LC-expert"}


@pytest.mark.parametrize("repo", REPOS)
def test_every_name_has_its_place_in_the_order_of_the_run(repo: str) -> None:
    family = family_of(repo)
    places = [family.place(name, repo) for name in names_of(repo)]
    assert {place.name for place in places if place.named} <= NAMED
    stages = {stage.name for stage in family.stages}
    assert {place.stage for place in places if not place.named} <= stages
    shuffled = random.Random(1).sample(places, len(places))
    assert sorted(shuffled, key=family.order) == places


@pytest.mark.parametrize("repo", REPOS)
def test_tokens_never_fall_and_rates_stay_below_the_highest_peak(repo: str) -> None:
    family = family_of(repo)
    last: dict[tuple[str | None, int | None], int] = {}
    rates = []
    for name in names_of(repo):
        place = family.place(name, repo)
        tokens, branch = family.tokens(place), (place.stage, place.ingredient)
        if tokens is not None:
            assert tokens >= last.get(branch, 0), name
            last[branch] = tokens
        assert not any("tokens, and its step" in note for note in family.notes(place, repo)), name
        rates.append(family.learning_rate(place))
    peaks = [
        float((piece.model_extra or {})["peak"]) for stage in family.stages for piece in stage.lr
    ]
    known = [rate for rate in rates if rate is not None]
    assert bool(known) or not peaks or family.family == "k2"
    assert all(0 <= rate <= max(peaks) * (1 + 1e-9) for rate in known)


@pytest.mark.parametrize("repo", REPOS)
def test_odd_digits_and_endings_make_no_place_of_any_family(repo: str) -> None:
    family, name = family_of(repo), names_of(repo)[0]
    for digit in ("\u0663", "\u00b2", "\uff11"):
        for k, sign in enumerate(name):
            if sign.isdigit():
                place = family.place(name[:k] + digit + name[k + 1 :], repo)
                assert str(place.step or "").isascii()
        assert family.place(name.rstrip("0123456789") + digit, repo).step is None
    for one in set(names_of(repo)[::50]) - NAMED:
        for end in ("\n", " ", "/..", "\x00"):
            assert family.place(one + end, repo).named, (one, end)
