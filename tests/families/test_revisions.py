"""Names that are on the Hub, as lists in the order of the run: read, placed, sorted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.families import Family, all_families, find, load
from tests.support.names import family_of

# repository -> its names in order, each with (stage, ingredient, step)
REAL: dict[str, list[tuple[str, tuple[str | None, int | None, int | None]]]] = {
    "allenai/OLMo-1B": [
        ("step1000-tokens4B", ("pretraining", None, 1_000)),
    ],
    "allenai/OLMo-1B-hf": [
        ("step738020-tokens3094B", ("pretraining", None, 738_020)),
    ],
    "allenai/OLMo-7B": [
        ("step10000-tokens44B", ("pretraining", None, 10_000)),
    ],
    "allenai/OLMo-1.7-7B-hf": [
        ("step651581-tokens2731B", ("pretraining", None, 651_581)),
    ],
    "allenai/OLMo-7B-0724-hf": [
        ("step1000-tokens4B", ("pretraining", None, 1_000)),
    ],
    "allenai/OLMo-1B-0724-hf": [
        ("step0-tokens0B", ("pretraining", None, 0)),
    ],
    "allenai/OLMo-2-0425-1B": [
        ("stage1-step300-tokens1B", ("stage1", None, 300)),
        ("stage2-ingredient1-step23852-tokens51B", ("stage2", 1, 23_852)),
    ],
    "allenai/OLMoE-1B-7B-0924": [
        ("step5000-tokens20B", ("pretraining", None, 5_000)),
    ],
    "allenai/OLMoE-1B-7B-0125": [
        ("step1200000-tokens5033B", ("pretraining", None, 1_200_000)),
    ],
    "allenai/Olmo-Hybrid-7B": [
        ("stage2-ingredient1+2-step23842", ("stage2", None, 23_842)),
        ("stage3-step1000", ("stage3", None, 1_000)),
    ],
    "allenai/OLMo-2-0425-1B-early-training": [
        ("stage1-step0-tokens0B", ("stage1", None, 0)),
    ],
    "allenai/OLMo-2-1124-7B": [
        ("step150-tokens1B", ("stage1", None, 150)),
        ("stage2-ingredient1-step6000-tokens26B", ("stage2", 1, 6_000)),
        ("main", ("stage2", None, None)),
    ],
    "allenai/OLMo-2-1124-13B": [
        ("stage1-step0-tokens0B", ("stage1", None, 0)),
        ("stage2-ingredient1-step11931-tokens100B", ("stage2", 1, 11_931)),
        ("main", ("stage2", None, None)),
    ],
    "allenai/OLMo-2-0325-32B": [
        ("stage1-step5001-tokens42B", ("stage1", None, 5_001)),
        ("stage2-ingredient1-step11921-tokens101B", ("stage2", 1, 11_921)),
        ("main", ("stage2", None, None)),
    ],
    "allenai/Olmo-3-1025-7B": [
        ("stage1-step0", ("stage1", None, 0)),
        ("stage2-step1000", ("stage2", None, 1_000)),
        ("stage2-step47684-mix-gen-mc-only-from-2T-ckpt", ("stage2", None, 47_684)),
        ("stage2-step47684-mix-math-code-reasoning-web-from-2T-ckpt", ("stage2", None, 47_684)),
        ("stage2-step47684-mix-round5-from-2T-ckpt", ("stage2", None, 47_684)),
        ("stage3-step11921", ("stage3", None, 11_921)),
    ],
    "allenai/Olmo-3-1125-32B": [
        ("stage1-step656000", ("stage1", None, 656_000)),
        ("stage2-ingredient1-step23842", ("stage2", 1, 23_842)),
        ("stage3-step10000", ("stage3", None, 10_000)),
        ("main", ("stage3", None, None)),
    ],
    "HuggingFaceTB/SmolLM3-3B-checkpoints": [
        ("stage1-step-40000", ("stage1", None, 40_000)),
        ("stage2-step-3480000", ("stage2", None, 3_480_000)),
        ("stage3-step-4240000", ("stage3", None, 4_240_000)),
        ("lc-4k-to-32k-step-4000", ("lc-4k-to-32k", None, 4_000)),
        ("lc-32k-to-64k-step-4000", ("lc-32k-to-64k", None, 4_000)),
        ("it-mid-training", (None, None, None)),
    ],
    "HuggingFaceTB/SmolLM3-3B-Base": [
        ("main", ("lc-32k-to-64k", None, 22_000)),
    ],
    "HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints": [
        ("step-125000", ("pretraining", None, 125_000)),
        ("main", (None, None, None)),
    ],
    "HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints": [
        ("step-160000", ("pretraining", None, 160_000)),
    ],
    "HuggingFaceTB/SmolLM2-135M-intermediate-checkpoints": [
        ("step-240000", ("pretraining", None, 240_000)),
    ],
    "swiss-ai/Apertus-8B-2509": [
        ("step50000-tokens210B", ("pretraining", None, 50_000)),
        ("longctx-step125", ("longctx", None, 125)),
        ("main", ("longctx", None, None)),
    ],
    "swiss-ai/Apertus-70B-2509": [
        ("step25000-tokens210B", ("pretraining", None, 25_000)),
        ("longctx-step50", ("longctx", None, 50)),
    ],
    "open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096": [
        ("iter_0002000", ("pretraining", None, 2_000)),
    ],
    "open-sci/open-sci-ref-v0.01-0.13b-c4-300B-4096-rope_theta-100k": [
        ("iter_0072661", ("pretraining", None, 72_661)),
    ],
    "LLM360/Amber": [
        ("ckpt_000", ("pretraining", None, 762)),
    ],
    "LLM360/CrystalCoder": [
        ("CrystalCoder_phase1_checkpoint_055500", ("phase1", None, 55_500)),
        ("CrystalCoder_phase2_checkpoint_001000", ("phase2", None, 1_000)),
        ("CrystalCoder_phase3_checkpoint_027728", ("phase3", None, 27_728)),
    ],
    "LLM360/K2": [
        ("ckpt_000", ("pretraining", None, None)),
        ("main", (None, None, None)),
    ],
    "EleutherAI/pythia-160m-deduped": [
        ("step0", ("pretraining", None, 0)),
    ],
    "EleutherAI/pythia-2.8b-v0": [
        ("step143000", ("pretraining", None, 143_000)),
    ],
}


@pytest.mark.parametrize("repo", REAL)
def test_real_revisions_are_placed_in_the_order_of_the_run(repo: str) -> None:
    family = family_of(repo)
    places = [family.place(name, repo) for name, _ in REAL[repo]]
    found = [(place.name, (place.stage, place.ingredient, place.step)) for place in places]
    assert found == REAL[repo]
    shuffled = random.Random(0).sample(places, len(places))
    assert sorted(shuffled, key=family.order) == places
    notes = [note for place in places for note in family.notes(place, repo)]
    assert [note for note in notes if "tokens, and its step" in note] == []


def test_every_family_but_the_demo_has_real_names_here() -> None:
    files = {"smollm2", "apertus", "open-sci", "pythia"}  # one size stands for the others
    seen = {family_of(repo).family for repo in REAL} | {"demo"}
    missing = {family.family for family in all_families()} - seen
    assert {name for name in missing if not name.startswith(tuple(files))} == set()


@pytest.mark.parametrize(
    ("family", "name", "note"),
    [
        ("olmo2-7b", "stage1-step1000-tokens50B", "names 50B tokens, and its step has 4.2B"),
        (
            "olmo2-7b",
            "stage2-ingredient1-step11931-tokens3946B",
            "names 3946B tokens, and its step has 50.",
        ),
        ("apertus-8b", "step2627139-tokens16T", "names 16000B tokens, and its step has 15000.0B"),
    ],
)
def test_a_name_whose_tokens_disagree_with_its_step_is_noted(
    family: str, name: str, note: str
) -> None:
    found = load(family)
    assert any(note in n for n in found.notes(found.place(name)))


def test_a_name_means_something_in_its_own_repository_only() -> None:
    family = load("smollm3")
    assert family.place("main").named
    assert family.place("main", "HuggingFaceTB/SmolLM3-3B-checkpoints").named
    assert not family.place("main", "HuggingFaceTB/SmolLM3-3B-Base").named
    assert family.bad("main", "HuggingFaceTB/SmolLM3-3B-checkpoints")
    assert not family.bad("main", "HuggingFaceTB/SmolLM3-3B")


def check_what_is_listed(family: Family) -> None:
    listed = [name for group in family.known_duplicates for name in group.revisions]
    listed += [name for soup in family.soups for name in soup.of]
    listed += [name for bad in family.known_bad for name in bad.revisions if "*" not in name]
    named = {named.name for named in family.named} | {"main"}
    for name in listed:
        assert name in named or not family.place(name).named, name
    for named_one in family.named:
        stages = {stage.name for stage in family.stages} | {None}
        assert named_one.stage in stages


def test_what_a_family_lists_is_read_by_itself() -> None:
    for family in all_families():
        check_what_is_listed(family)


@pytest.mark.parametrize(
    ("family", "name", "count"),
    [
        ("olmo2-7b", "stage1-step101000-tokens424B", 1),  # listed without tokens
        ("olmo2-7b", "stage1-step101001-tokens424B", 0),
        ("olmo2-7b", "stage2-ingredient1-step11931-tokens50B", 0),
        ("olmo2-13b", "stage2-ingredient1-step11931-tokens101B", 1),
        ("olmo2-13b", "stage2-ingredient4-step35773-tokens300B", 0),
        ("pythia-70m", "step1", 1),
        ("pythia-70m", "step2", 0),
        ("olmo3-7b", "stage3-step11921", 1),
    ],
)
def test_duplicates_are_found_by_place_whatever_the_label(
    family: str, name: str, count: int
) -> None:
    assert len(load(family).duplicates(name)) == count


def test_bad_revisions_are_those_of_their_repository() -> None:
    family = load("pythia-12b")
    assert family.bad("step50000", "EleutherAI/pythia-12b")
    assert not family.bad("step50000", "EleutherAI/pythia-12b-deduped")
    assert not family.bad("step51000", "EleutherAI/pythia-12b")
    (some,) = load("pythia-2.8b").bad("step3000", "EleutherAI/pythia-2.8b")
    assert some.some


@pytest.mark.parametrize(
    "repo",
    [
        "EleutherAI/pythia",
        "allenai/OLMo-2-1124-7B-Instruct",
        "allenai/OLMo-7B-Twin-2T",
        "open-sci/other",
    ],
)
def test_a_neighbour_is_not_taken_for_the_family(repo: str) -> None:
    assert find(repo) is None


@pytest.mark.parametrize(
    ("repo", "family"),
    [
        ("EleutherAI/pythia-160m-deduped-v0", "pythia-v0"),
        ("EleutherAI/pythia-1b", "pythia-1b"),
        ("EleutherAI/pythia-1.4b-data-seed1", "pythia-1.4b"),
        ("open-sci/open-sci-ref-v0.01-1.7b-c4-300B-16384", "open-sci"),
        ("open-sci/open-sci-ref-v0.01-0.4b-hplt-2.0-50B-4096", "open-sci-50b"),
        ("LLM360/Crystal", "crystal"),
    ],
)
def test_a_repository_finds_its_own_size(repo: str, family: str) -> None:
    assert family_of(repo).family == family


def test_no_repository_belongs_to_two_files() -> None:
    from fnmatch import fnmatchcase

    for repo in REAL:
        heads = {
            family.family.partition("-")[0] if "pythia" in repo else family.sources
            for family in all_families()
            if any(fnmatchcase(repo, glob) for glob in family.match.repos)
        }
        assert len(heads) == 1, (repo, heads)


# Pieces of real names in any order, so that patterns are nearly met, and whatever else there is.
PIECES = st.lists(
    st.sampled_from(
        [name for rows in REAL.values() for name, _ in rows]
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
