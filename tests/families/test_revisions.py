"""Names that are on the Hub, as lists in the order of the run: read, placed, sorted."""

from __future__ import annotations

import random
import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.families import all_families, find, load
from qaudit.families.family import Place, order, parse_name
from tests.support.names import family_of, names_of, recorded

# repository, and below it its names in order, each with stage, ingredient and step
REAL = """
allenai/OLMo-1B
    step1000-tokens4B pretraining - 1000
allenai/OLMo-1B-hf
    step738020-tokens3094B pretraining - 738020
allenai/OLMo-7B
    step10000-tokens44B pretraining - 10000
allenai/OLMo-1.7-7B-hf
    step651581-tokens2731B pretraining - 651581
allenai/OLMo-7B-0724-hf
    step1000-tokens4B pretraining - 1000
allenai/OLMo-1B-0724-hf
    step0-tokens0B pretraining - 0
allenai/OLMo-2-0425-1B
    stage1-step300-tokens1B stage1 - 300
    stage2-ingredient1-step23852-tokens51B stage2 1 23852
allenai/OLMoE-1B-7B-0924
    step5000-tokens20B pretraining - 5000
allenai/OLMoE-1B-7B-0125
    step1200000-tokens5033B pretraining - 1200000
allenai/Olmo-Hybrid-7B
    stage2-ingredient1+2-step23842 stage2 - 23842
    stage3-step1000 stage3 - 1000
allenai/OLMo-2-0425-1B-early-training
    stage1-step0-tokens0B stage1 - 0
allenai/OLMo-2-1124-7B
    step150-tokens1B stage1 - 150
    stage2-ingredient1-step6000-tokens26B stage2 1 6000
    main stage2 - -
allenai/OLMo-2-1124-13B
    stage1-step0-tokens0B stage1 - 0
    stage2-ingredient1-step11931-tokens100B stage2 1 11931
    main stage2 - -
allenai/OLMo-2-0325-32B
    stage1-step5001-tokens42B stage1 - 5001
    stage2-ingredient1-step11921-tokens101B stage2 1 11921
    main stage2 - -
allenai/Olmo-3-1025-7B
    stage1-step0 stage1 - 0
    stage2-step1000 stage2 - 1000
    stage2-step47684-mix-gen-mc-only-from-2T-ckpt stage2 - 47684
    stage2-step47684-mix-math-code-reasoning-web-from-2T-ckpt stage2 - 47684
    stage2-step47684-mix-round5-from-2T-ckpt stage2 - 47684
    stage3-step11921 stage3 - 11921
allenai/Olmo-3-1125-32B
    stage1-step656000 stage1 - 656000
    stage2-ingredient1-step23842 stage2 1 23842
    stage3-step10000 stage3 - 10000
    main stage3 - -
HuggingFaceTB/SmolLM3-3B-checkpoints
    stage1-step-40000 stage1 - 40000
    stage2-step-3480000 stage2 - 3480000
    stage3-step-4240000 stage3 - 4240000
    lc-4k-to-32k-step-4000 lc-4k-to-32k - 4000
    lc-32k-to-64k-step-4000 lc-32k-to-64k - 4000
    it-mid-training - - -
HuggingFaceTB/SmolLM3-3B-Base
    main lc-32k-to-64k - 22000
HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints
    step-125000 pretraining - 125000
    main - - -
HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints
    step-160000 pretraining - 160000
HuggingFaceTB/SmolLM2-135M-intermediate-checkpoints
    step-240000 pretraining - 240000
swiss-ai/Apertus-8B-2509
    step50000-tokens210B pretraining - 50000
    longctx-step125 longctx - 125
    main longctx - -
swiss-ai/Apertus-70B-2509
    step25000-tokens210B pretraining - 25000
    longctx-step50 longctx - 50
open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096
    iter_0002000 pretraining - 2000
open-sci/open-sci-ref-v0.01-0.13b-c4-300B-4096-rope_theta-100k
    iter_0072661 pretraining - 72661
LLM360/Amber
    ckpt_000 pretraining - 762
LLM360/CrystalCoder
    CrystalCoder_phase1_checkpoint_055500 phase1 - 55500
    CrystalCoder_phase2_checkpoint_001000 phase2 - 1000
    CrystalCoder_phase3_checkpoint_027728 phase3 - 27728
LLM360/K2
    ckpt_000 pretraining - -
    main - - -
EleutherAI/pythia-160m-deduped
    step0 pretraining - 0
EleutherAI/pythia-2.8b-v0
    step143000 pretraining - 143000
"""


def real() -> dict[str, list[list[str]]]:
    """Return the names of each repository with their places."""
    found: dict[str, list[list[str]]] = {}
    for line in REAL.strip().splitlines():
        if not line.startswith(" "):
            rows = found[line] = []
        else:
            rows.append(line.split())
    return found


def test_real_revisions_are_placed_in_the_order_of_the_run() -> None:
    for repo, rows in real().items():
        family = family_of(repo)
        places = [family.place(name, repo) for name, *_ in rows]
        numbers = [(p.stage, p.ingredient, p.step) for p in places]
        assert [["-" if n is None else str(n) for n in row] for row in numbers] == [
            row[1:] for row in rows
        ], repo
        shuffled = random.Random(0).sample(places, len(places))
        assert sorted(shuffled, key=family.order) == places, repo
        notes = [note for place in places for note in family.notes(place, repo)]
        assert [note for note in notes if "tokens, and its step" in note] == [], repo


def test_every_family_but_the_demo_has_real_names_here() -> None:
    files = {"smollm2", "apertus", "open-sci", "pythia"}  # one size stands for the others
    seen = {family_of(repo).family for repo in real()} | {"demo"}
    missing = {family.family for family in all_families()} - seen
    assert {name for name in missing if not name.startswith(tuple(files))} == set()


def test_a_name_whose_tokens_disagree_with_its_step_is_noted() -> None:
    for family, name, named, counted in (
        ("olmo2-7b", "stage1-step1000-tokens50B", "50B", "4.2B"),
        ("olmo2-7b", "stage2-ingredient1-step11931-tokens3946B", "3946B", "50."),
        ("apertus-8b", "step2627139-tokens16T", "16000B", "15000.0B"),
    ):
        found, note = load(family), f"names {named} tokens, and its step has {counted}"
        assert any(note in n for n in found.notes(found.place(name)))


def test_a_name_means_something_in_its_own_repository_only() -> None:
    family = load("smollm3")
    assert family.place("main").named
    assert family.place("main", "HuggingFaceTB/SmolLM3-3B-checkpoints").named
    assert not family.place("main", "HuggingFaceTB/SmolLM3-3B-Base").named
    assert family.bad("main", "HuggingFaceTB/SmolLM3-3B-checkpoints")
    assert not family.bad("main", "HuggingFaceTB/SmolLM3-3B")


def test_what_a_family_lists_is_read_by_itself() -> None:
    for family in all_families():
        lists = (*family.known_duplicates, *family.known_bad)
        listed = [name for group in lists for name in group.revisions if "*" not in name]
        listed += [name for soup in family.soups for name in soup.of]
        named = {named.name for named in family.named} | {"main"}
        assert all(name in named or not family.place(name).named for name in listed)
        stages = {stage.name for stage in family.stages} | {None}
        assert {place.stage for place in family.named} <= stages


def test_duplicates_are_found_by_place_whatever_the_label() -> None:
    for family, name, count in (
        ("olmo2-7b", "stage1-step101000-tokens424B", 1),  # listed without tokens
        ("olmo2-7b", "stage1-step101001-tokens424B", 0),
        ("olmo2-7b", "stage2-ingredient1-step11931-tokens50B", 0),
        ("olmo2-13b", "stage2-ingredient1-step11931-tokens101B", 1),
        ("olmo2-13b", "stage2-ingredient4-step35773-tokens300B", 0),
        ("pythia-70m", "step1", 1),
        ("pythia-70m", "step2", 0),
        ("olmo3-7b", "stage3-step11921", 1),
    ):
        assert len(load(family).duplicates(name)) == count, (family, name)


def test_bad_revisions_are_those_of_their_repository() -> None:
    family = load("pythia-12b")
    assert family.bad("step50000", "EleutherAI/pythia-12b")
    assert not family.bad("step50000", "EleutherAI/pythia-12b-deduped")
    assert not family.bad("step51000", "EleutherAI/pythia-12b")
    (some,) = load("pythia-2.8b").bad("step3000", "EleutherAI/pythia-2.8b")
    assert some.some


def test_a_repository_finds_its_own_size_and_a_neighbour_none() -> None:
    for repo, family in (
        ("EleutherAI/pythia-160m-deduped-v0", "pythia-v0"),
        ("EleutherAI/pythia-1b", "pythia-1b"),
        ("EleutherAI/pythia-1.4b-data-seed1", "pythia-1.4b"),
        ("open-sci/open-sci-ref-v0.01-1.7b-c4-300B-16384", "open-sci"),
        ("open-sci/open-sci-ref-v0.01-0.4b-hplt-2.0-50B-4096", "open-sci-50b"),
        ("LLM360/Crystal", "crystal"),
    ):
        assert family_of(repo).family == family
    for repo in ("EleutherAI/pythia", "allenai/OLMo-2-1124-7B-Instruct", "open-sci/other"):
        assert find(repo) is None


def test_no_repository_belongs_to_two_files() -> None:
    for repo in real():
        heads = {
            family.family.partition("-")[0] if "pythia" in repo else family.sources
            for family in all_families()
            if any(fnmatchcase(repo, glob) for glob in family.match.repos)
        }
        assert len(heads) == 1, (repo, heads)


REPOS = recorded()

# What no number orders: their families place them by name, or not at all.
NAMED = {"main", "it-mid-training", "it-SFT", "it-soup-APO", "it-LC-expert"}


@pytest.mark.parametrize("repo", REPOS)
def test_every_name_has_its_place_and_tokens_never_fall(repo: str) -> None:
    family = family_of(repo)
    places = [family.place(name, repo) for name in names_of(repo)]
    assert {place.name for place in places if place.named} <= NAMED
    stages = {stage.name for stage in family.stages}
    assert {place.stage for place in places if not place.named} <= stages
    shuffled = random.Random(1).sample(places, len(places))
    assert sorted(shuffled, key=family.order) == places

    last: dict[tuple[str | None, int | None], int] = {}
    for place in places:
        tokens, branch = family.tokens(place), (place.stage, place.ingredient)
        if tokens is not None:
            assert tokens >= last.get(branch, 0), place
            last[branch] = tokens
        assert not any("tokens, and its step" in note for note in family.notes(place, repo)), place
    peaks = [
        float((piece.model_extra or {})["peak"]) for stage in family.stages for piece in stage.lr
    ]
    rates = [rate for rate in map(family.learning_rate, places) if rate is not None]
    assert bool(rates) or not peaks or family.family == "k2"
    assert all(0 <= rate <= max(peaks) * (1 + 1e-9) for rate in rates)


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


# Pieces of real names in any order, so that patterns are nearly met, and whatever else there is.
PIECES = st.lists(
    st.sampled_from(
        [name for rows in real().values() for name, *_ in rows]
        + ["stage1", "-step", "step-", "-tokens", "9" * 30, "9" * 18, "B", "T", "ckpt_", "iter_"]
        + ["-ingredient", "longctx", "0", "1", "\n", "/", "\u0663", "-mix-", "_", "."]
    ),
    max_size=6,
).map("".join)


@given(name=st.one_of(PIECES, st.text(max_size=60)), other=PIECES)
def test_no_name_makes_a_family_raise(name: str, other: str) -> None:
    for family in all_families():
        places = [family.place(name), family.place(other)]
        assert [place.name for place in places] == [name, other]
        sorted(places, key=family.order)
        for place in places:
            rate, tokens = family.learning_rate(place), family.tokens(place)
            assert rate is None or rate >= 0
            assert tokens is None or tokens >= 0
            family.notes(place)
        family.bad(name)
        family.duplicates(name)


# --------------------------------------------------------------------------------------------------
# Names alone, without a family: each in public use is a row; and whatever else a folder is called.


B, T = 10**9, 10**12

READ = [
    ("step0", {"step": 0}),
    ("step1000-tokens4B", {"step": 1000, "tokens": 4 * B}),
    ("step2627139-tokens15T", {"step": 2_627_139, "tokens": 15 * T}),
    ("stage1-step1000-tokens5B", {"stage": "stage1", "step": 1000, "tokens": 5 * B}),
    ("stage1-step0-tokens0B", {"stage": "stage1", "step": 0, "tokens": 0}),
    (
        "stage2-ingredient1-step11931-tokens50B",
        {"stage": "stage2", "ingredient": 1, "step": 11_931, "tokens": 50 * B},
    ),
    ("stage2-ingredient2-step23842", {"stage": "stage2", "ingredient": 2, "step": 23_842}),
    (
        "stage2-step47684-mix-round5-from-2T-ckpt",
        {"stage": "stage2", "step": 47_684, "variant": "mix-round5-from-2T-ckpt"},
    ),
    ("stage1-step-40000", {"stage": "stage1", "step": 40_000}),
    ("lc-4k-to-32k-step-4000", {"stage": "lc-4k-to-32k", "step": 4000}),
    ("it-soup-APO", {}),
    ("step-125000", {"step": 125_000}),
    ("step-001000-2BT", {"step": 1000, "tokens": 2 * B}),
    ("ckpt_000", {"index": 0}),
    ("CrystalCoder_phase1_checkpoint_055500", {"stage": "phase1", "step": 55_500}),
    ("iter_0002000", {"step": 2000}),
    ("longctx-step125", {"stage": "longctx", "step": 125}),
    ("extension_step0001220", {"stage": "extension", "step": 1220}),
    ("global_step1000", {"step": 1000}),
    ("step_200", {"step": 200}),
    ("step-024000_tokens-0100B-phase1", {"stage": "phase1", "step": 24_000, "tokens": 100 * B}),
    ("531B", {"tokens": 531 * B}),
    ("128000", {"step": 128_000}),
    ("checkpoint-500", {"step": 500}),
    ("checkpoint-500/", {"step": 500}),
    ("iter_0002384/mp_rank_00/", {"step": 2384}),
    ("ckpt_0/", {"index": 0}),
    (
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        {"step": 1_431_000, "tokens": 3 * T},
    ),
    (
        "TinyLlama-1.1B-intermediate-step-955k-token-2T",
        {"step": 955_000, "tokens": 2 * T},
    ),
    ("TinyLlama-1.1B-intermediate-step-240k-503b", {"step": 240_000, "tokens": 503 * B}),
    ("stage1-step10-tokens2.5B", {"stage": "stage1", "step": 10, "tokens": 2_500_000_000}),
    ("main", {}),
    ("", {}),
]


def test_real_names_are_read() -> None:
    for name, expected in READ:
        assert parse_name(name) == Place(name, **expected)


MALFORMED = st.one_of(
    st.text(),
    st.from_regex(
        re.compile(
            r"(stage|phase|ckpt|iter|step|ingredient|tokens|[-_/.]|[0-9]{1,30}|[KMBT]){0,12}"
        ),
        fullmatch=True,
    ),
    st.sampled_from([name for name, _ in READ]).flatmap(
        lambda name: st.tuples(st.text(max_size=3), st.just(name), st.text(max_size=3)).map("".join)
    ),
)


@given(st.lists(MALFORMED, max_size=6))
def test_any_names_are_read_and_have_places_of_their_own_in_the_order(names: list[str]) -> None:
    places = [parse_name(name) for name in names]
    assert [place.name for place in places] == names
    for place in places:
        assert all(n is None or n >= 0 for n in (place.step, place.tokens, place.index))
    keys = sorted(map(order, places))
    assert len(set(keys)) == len(set(names))


def test_odd_digits_and_endings_make_a_named_checkpoint() -> None:
    for name in ("step10\n", "step\u0663", "step" + "9" * 5000):
        assert parse_name(name).named


def in_order(names: list[str], stages: tuple[str, ...] = ()) -> list[str]:
    return sorted(names, key=lambda name: order(parse_name(name), stages))


def test_stages_come_before_ingredients_and_these_before_steps() -> None:
    expected = [
        "step5",
        "stage1-step900",
        "stage2-ingredient1-step100",
        "stage2-ingredient1-step1000",
        "stage2-ingredient2-step20",
        "stage10-step1",
        "lc-4k-to-32k-step-4000",
        "lc-32k-to-64k-step-4000",
        "it-SFT",
        "main",
    ]
    assert in_order(expected[::-1]) == expected


def test_a_family_says_how_its_stages_follow() -> None:
    names = ["warm-step9", "cool-step1", "late-step2"]
    assert in_order(names, ("warm", "cool")) == names
