"""Whole series by name, as public repositories have them: each name placed, each in its order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.families.names import order, parse_name
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


# ------------------------------------------------------------------------------------ odd names

REAL = st.sampled_from([name for repo in REPOS for name in names_of(repo)[::97]])
ODD = st.sampled_from(
    [
        "",
        "..",
        "../..",
        "/",
        "a/../b",
        "\n",
        "\r\n",
        "\x00",
        "\u0663",  # a digit, though none of ASCII
        "\u00b2",  # a digit that `int` refuses
        "\uff11",
        "\u2028",
        "\ud800",  # half a character
        "9" * 5000,
        "x" * 100_000,
        "-" * 5000,
        "stage" * 2000,
        "step-" * 2000,
        "%2e%2e",
    ]
)


@st.composite
def spoiled(draw: st.DrawFn) -> str:
    """Return a real name with something that does not belong there, anywhere in it."""
    name, odd = draw(REAL), draw(ODD)
    where = draw(st.integers(0, len(name)))
    return draw(st.sampled_from([odd, name[:where] + odd + name[where:], odd + name, name + odd]))


@given(spoiled())
def test_a_spoiled_name_is_kept_whole_and_never_raises(name: str) -> None:
    place = parse_name(name)
    assert place.name == name
    order(place)
    for repo in ("allenai/OLMo-2-1124-7B", "LLM360/Crystal", "EleutherAI/pythia-160m"):
        family = family_of(repo)
        place = family.place(name, repo)
        assert place.name == name
        family.order(place)
        family.tokens(place)
        family.learning_rate(place)
        family.notes(place, repo)
        family.bad(name, repo)
        family.duplicates(name, repo)


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
