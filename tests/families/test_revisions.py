"""Names that are on the Hub, as lists in the order of the run: read, placed, sorted.

Two learning rates are printed in the trainers' own configurations (OLMo 2 1B and 7B, at the end of
stage 1). Others were computed elsewhere from the same published inputs: they hold what the files
say against slips of the pen, not against what the trainers logged.
"""

import random
import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.families import all_families, find, load
from qaudit.families.family import Place, order, parse_name
from tests.support.names import family_of, names_of, recorded

# Repository and name; stage, ingredient and step; where they are known learning rate and tokens.
REAL = """
allenai/OLMo-1B step369000-tokens1548B pretraining - 369000 0.0002212762
allenai/OLMo-1B step738020-tokens3095B pretraining - 738020 4.00028e-05 3095480238080
allenai/OLMo-1B-hf step738020-tokens3094B pretraining - 738020
allenai/OLMo-7B step10000-tokens44B pretraining - 10000
allenai/OLMo-7B main pretraining - 557000 0
allenai/OLMo-1.7-7B-hf step651581-tokens2731B pretraining - 651581
allenai/OLMo-1.7-7B-hf step700000 pretraining - 700000 -
allenai/OLMo-7B-0724-hf step1000-tokens4B pretraining - 1000
allenai/OLMo-1B-0724-hf step954000-tokens2000B pretraining - 954000 -
allenai/OLMo-2-0425-1B stage1-step1907359-tokens4001B stage1 - 1907359 7.448729e-05 4000021741568
allenai/OLMo-2-0425-1B stage2-ingredient1-step12000-tokens26B stage2 1 12000 3.699647e-05
allenai/OLMo-2-0425-1B stage2-ingredient3-step23852-tokens51B stage2 3 23852 ? 4050043011072
allenai/OLMoE-1B-7B-0924 step5000-tokens20B pretraining - 5000 0.0003999961
allenai/OLMoE-1B-7B-0924 step1200000-tokens5033B pretraining - 1200000 ? 5033164800000
allenai/OLMoE-1B-7B-0924 step1220000-tokens5117B pretraining - 1220000 4e-05
allenai/OLMoE-1B-7B-0924 main anneal - 23842 0 5133165395968
allenai/OLMoE-1B-7B-0125 step600000-tokens2516B pretraining - 600000 0.0002187148
allenai/OLMoE-1B-7B-0125 stage2-ingredient2-step11921-tokens51B stage2 2 11921 2e-05
allenai/OLMoE-1B-7B-0125 stage2-ingredient3-step23842-tokens101B stage2 3 23842 0
allenai/Olmo-Hybrid-7B stage1-step2000 stage1 - 2000 0.0003
allenai/Olmo-Hybrid-7B stage1-step708039 stage1 - 708039 0.000165
allenai/Olmo-Hybrid-7B stage2-ingredient2-step23842 stage2 2 23842 0
allenai/Olmo-Hybrid-7B stage2-ingredient1+2-step23842 stage2 - 23842
allenai/Olmo-Hybrid-7B stage3-step1000 stage3 - 1000
allenai/OLMo-2-0425-1B-early-training stage1-step0-tokens0B stage1 - 0
allenai/OLMo-2-1124-7B step150-tokens1B stage1 - 150
allenai/OLMo-2-1124-7B stage1-step1000-tokens5B stage1 - 1000 0.00015 4194304000
allenai/OLMo-2-1124-7B stage1-step928000-tokens3893B stage1 - 928000 6.149879e-05
allenai/OLMo-2-1124-7B stage2-ingredient1-step11931-tokens50B stage2 1 11931 0
allenai/OLMo-2-1124-7B stage2-ingredient3-step6000-tokens26B stage2 3 6000 3.054554e-05
allenai/OLMo-2-1124-7B stage2-ingredient3-step11931-tokens50B stage2 3 11931 ? 3945065873408
allenai/OLMo-2-1124-7B main stage2 - -
allenai/OLMo-2-1124-13B stage1-step596057-tokens5001B stage1 - 596057 9e-05
allenai/OLMo-2-1124-13B stage2-ingredient1-step11931-tokens100B stage2 1 11931 0
allenai/OLMo-2-1124-13B stage2-ingredient4-step20000-tokens168B stage2 4 20000 3.966835e-05
allenai/OLMo-2-1124-13B stage2-ingredient4-step35773-tokens300B stage2 4 35773 0 5300174192640
allenai/OLMo-2-1124-13B main stage2 - - -
allenai/OLMo-2-0325-32B stage1-step721901-tokens6056B stage1 - 721901 6.623217e-05
allenai/OLMo-2-0325-32B stage2-ingredient3-step35763-tokens301B stage2 3 35763 0
allenai/OLMo-2-0325-32B stage2-ingredient4-step11921-tokens101B stage2 4 11921 0
allenai/OLMo-2-0325-32B main stage2 - -
allenai/Olmo-3-1025-7B stage1-step597046 stage1 - 597046 0.000165
allenai/Olmo-3-1025-7B stage1-step800000 stage1 - 800000 0.0001254377
allenai/Olmo-3-1025-7B stage1-step1413814 stage1 - 1413814 3.932522e-05
allenai/Olmo-3-1025-7B stage2-step1000 stage2 - 1000 ? 5932062867456
allenai/Olmo-3-1025-7B stage2-step47684-mix-gen-mc-only-from-2T-ckpt stage2 - 47684
allenai/Olmo-3-1025-7B stage2-step47684-mix-math-code-reasoning-web-from-2T-ckpt stage2 - 47684
allenai/Olmo-3-1025-7B stage2-step47684-mix-round5-from-2T-ckpt stage2 - 47684 - -
allenai/Olmo-3-1025-7B main stage3 - 11921 0 6079966609408
allenai/Olmo-3-1025-7B stage3-step11921 stage3 - 11921
allenai/Olmo-3-1125-32B stage1-step5000 stage1 - 5000 -
allenai/Olmo-3-1125-32B stage2-ingredient1-step23842 stage2 1 23842
allenai/Olmo-3-1125-32B stage3-step10000 stage3 - 10000
allenai/Olmo-3-1125-32B main stage3 - -
HuggingFaceTB/SmolLM3-3B-checkpoints stage1-step-40000 stage1 - 40000
HuggingFaceTB/SmolLM3-3B-checkpoints stage2-step-3480000 stage2 - 3480000
HuggingFaceTB/SmolLM3-3B-checkpoints stage3-step-4200000 stage3 - 4200000 0.0001992341
HuggingFaceTB/SmolLM3-3B-checkpoints stage3-step-4480000 stage3 - 4480000 9.195441e-05
HuggingFaceTB/SmolLM3-3B-checkpoints stage3-step-4720000 stage3 - 4720000 0 11135877120000
HuggingFaceTB/SmolLM3-3B-checkpoints lc-4k-to-32k-step-4000 lc-4k-to-32k - 4000 1.879474e-05 -
HuggingFaceTB/SmolLM3-3B-checkpoints lc-4k-to-32k-step-20000 lc-4k-to-32k - 20000 0
HuggingFaceTB/SmolLM3-3B-checkpoints lc-32k-to-64k-step-4000 lc-32k-to-64k - 4000 1.900969e-05
HuggingFaceTB/SmolLM3-3B-checkpoints it-mid-training - - -
HuggingFaceTB/SmolLM3-3B-checkpoints it-SFT - - - - -
HuggingFaceTB/SmolLM3-3B-Base main lc-32k-to-64k - 22000
HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints step-125000 pretraining - 125000 0.0005
HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints step-4750000 pretraining - 4750000 0.0004675573
HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints step-5125000 pretraining - 5125000 0.0001097328
HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints main - - -
HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints step-40000 pretraining - 40000 3e-3 62914560000
HuggingFaceTB/SmolLM2-135M-intermediate-checkpoints step-240000 pretraining - 240000 0.003
swiss-ai/Apertus-8B-2509 step50000-tokens210B pretraining - 50000 0.00011
swiss-ai/Apertus-8B-2509 step1700000-tokens7232B pretraining - 1700000 ? 7222591488000
swiss-ai/Apertus-8B-2509 step2429920 pretraining - 2429920 0.0001098802
swiss-ai/Apertus-8B-2509 step2600000-tokens14792B pretraining - 2600000 1.806368e-05
swiss-ai/Apertus-8B-2509 step2627139-tokens15T pretraining - 2627139 1.100009e-05
swiss-ai/Apertus-8B-2509 longctx-step125 longctx - 125 ? -
swiss-ai/Apertus-8B-2509 main longctx - -
swiss-ai/Apertus-70B-2509 step525000-tokens4420B pretraining - 525000 ? 4416451117056
swiss-ai/Apertus-70B-2509 step1057219 pretraining - 1057219 9.989113e-06
swiss-ai/Apertus-70B-2509 step1100000 pretraining - 1100000 4.071994e-06
swiss-ai/Apertus-70B-2509 step1150000-tokens14920B pretraining - 1150000 1.270039e-06
swiss-ai/Apertus-70B-2509 longctx-step50 longctx - 50
open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096 iter_0002000 pretraining - 2000 ? 8257536000
open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096 iter_0190000 pretraining - 190000 0.004
open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096 iter_0218000 pretraining - 218000 0.001998679
open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096 iter_0242000 pretraining - 242000 1.684558e-05
open-sci/open-sci-ref-v0.01-1.7b-c4-300B-4096 iter_0004000 pretraining - 4000 0.00064
open-sci/open-sci-ref-v0.01-1.7b-c4-300B-4096 iter_0030000 pretraining - 30000 0.004
open-sci/open-sci-ref-v0.01-1.7b-c4-300B-4096 iter_0060000 pretraining - 60000 0.003484999
open-sci/open-sci-ref-v0.01-1.7b-c4-300B-4096 iter_0072000 pretraining - 72000 0.0001819433
LLM360/Amber ckpt_000 pretraining - 762 0.0001143
LLM360/Amber ckpt_100 pretraining - 76962 0.0002525878
LLM360/Amber ckpt_358 pretraining - 273558 3.000522e-05
LLM360/Amber main pretraining - 274320 ? 1258448486400
LLM360/CrystalCoder CrystalCoder_phase1_checkpoint_055500 phase1 - 55500
LLM360/CrystalCoder CrystalCoder_phase2_checkpoint_001000 phase2 - 1000 ? -
LLM360/CrystalCoder CrystalCoder_phase3_checkpoint_027728 phase3 - 27728
LLM360/K2 ckpt_100 pretraining - - - -
LLM360/K2 main - - -
EleutherAI/pythia-160m-deduped step512 pretraining - 512 0.0002148252
EleutherAI/pythia-160m-deduped step10000 pretraining - 10000 0.0005946985
EleutherAI/pythia-160m-deduped main pretraining - 143000 ? 299892736000
EleutherAI/pythia-160m-deduped step143000 pretraining - 143000 6e-05
EleutherAI/pythia-2.8b-v0 step1000 pretraining - 1000 -
EleutherAI/pythia-14m step1430 pretraining - 1430 0.001
EleutherAI/pythia-31m step1430 pretraining - 1430 0.001
EleutherAI/pythia-70m-deduped step1430 pretraining - 1430 0.001
EleutherAI/pythia-160m-seed3 step1430 pretraining - 1430 0.0006
EleutherAI/pythia-410m step1430 pretraining - 1430 0.0003
EleutherAI/pythia-1b-deduped step1430 pretraining - 1430 0.00025
EleutherAI/pythia-1.4b step1430 pretraining - 1430 0.0002
EleutherAI/pythia-2.8b step1430 pretraining - 1430 0.00016
EleutherAI/pythia-6.9b step1430 pretraining - 1430 0.00012
EleutherAI/pythia-12b-deduped step1430 pretraining - 1430 0.00012
open-sci/open-sci-ref-v0.01-0.4b-c4-300B-4096-lr0.006-2 iter_0030000 pretraining - 30000 0.006
open-sci/open-sci-ref-v0.01-1.7b-c4-300B-4096-warmup5000 iter_0004000 pretraining - 4000 0.0032
open-sci/open-sci-ref-v0.01-0.4b-hplt-2.0-50B-4096 iter_0002000 pretraining - 2000 -
open-sci/open-sci-ref-v0.01-1.7b-c4-300B-16384 iter_0002000 pretraining - 2000 - -
"""


def real():
    """Return the names of each repository with their places, in the order of the run."""
    found = {}
    for line in REAL.strip().splitlines():
        repo, *row = line.split()
        found.setdefault(repo, []).append(row)
    return found


def test_real_revisions_are_placed_in_the_order_of_the_run_with_what_was_published():
    for repo, rows in real().items():
        family = family_of(repo)
        places = [family.place(name, repo) for name, *_ in rows]
        for place, (name, *expected) in zip(places, rows, strict=True):
            numbers = (place.stage, place.ingredient, place.step)
            assert ["-" if n is None else str(n) for n in numbers] == expected[:3], (repo, name)
            rate, tokens = (*expected[3:], "?", "?")[:2]
            wanted = None if rate == "-" else rate
            if rate not in ("?", "-"):
                wanted = pytest.approx(float(rate), rel=1e-6, abs=1e-9)
            assert rate == "?" or family.learning_rate(place) == wanted, (repo, name)
            assert tokens in ("?", str(family.tokens(place) or "-")), (repo, name)
        shuffled = random.Random(0).sample(places, len(places))
        assert sorted(shuffled, key=family.order) == places, repo
        notes = [note for place in places for note in family.notes(place, repo)]
        assert [note for note in notes if "tokens, and its step" in note] == [], repo


def test_a_name_means_something_in_its_own_repository_only():
    family = load("smollm3")
    assert family.place("main").named
    repo = "HuggingFaceTB/SmolLM3-3B"
    assert family.place("main", f"{repo}-checkpoints").named
    assert not family.place("main", f"{repo}-Base").named
    pythia = load("pythia-12b")
    for of, name, at, bad in (
        (family, "main", f"{repo}-checkpoints", True),
        (family, "main", repo, False),
        (pythia, "step50000", "EleutherAI/pythia-12b", True),
        (pythia, "step50000", "EleutherAI/pythia-12b-deduped", False),
        (pythia, "step51000", "EleutherAI/pythia-12b", False),
    ):
        assert bool(of.bad(name, at)) == bad, (name, at)
    (some,) = load("pythia-2.8b").bad("step3000", "EleutherAI/pythia-2.8b")
    assert some.some


def test_what_a_family_lists_is_read_by_itself_and_each_has_real_names_here():
    for family in all_families():
        lists = (*family.known_duplicates, *family.known_bad)
        listed = [name for group in lists for name in group.revisions if "*" not in name]
        listed += [name for soup in family.soups for name in soup.of]
        named = {named.name for named in family.named} | {"main"}
        assert all(name in named or not family.place(name).named for name in listed)
        stages = {stage.name for stage in family.stages} | {None}
        assert {place.stage for place in family.named} <= stages
    files = {"smollm2", "apertus", "open-sci", "pythia"}  # one size stands for the others
    seen = {family_of(repo).family for repo in real()} | {"demo"}
    missing = {family.family for family in all_families()} - seen
    assert {name for name in missing if not name.startswith(tuple(files))} == set()


def test_duplicates_are_found_by_place_and_tokens_that_disagree_with_a_step_noted():
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
    for family, name, named, counted in (
        ("olmo2-7b", "stage1-step1000-tokens50B", "50B", "4.2B"),
        ("olmo2-7b", "stage2-ingredient1-step11931-tokens3946B", "3946B", "50."),
        ("apertus-8b", "step2627139-tokens16T", "16000B", "15000.0B"),
    ):
        found, note = load(family), f"names {named} tokens, and its step has {counted}"
        assert any(note in n for n in found.notes(found.place(name)))


def test_a_repository_finds_its_own_size_and_a_neighbour_none_and_no_other_file():
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
def test_every_name_has_its_place_and_tokens_never_fall(repo):
    family = family_of(repo)
    places = [family.place(name, repo) for name in names_of(repo)]
    assert {place.name for place in places if place.named} <= NAMED
    stages = {stage.name for stage in family.stages}
    assert {place.stage for place in places if not place.named} <= stages
    shuffled = random.Random(1).sample(places, len(places))
    assert sorted(shuffled, key=family.order) == places

    last = {}
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
def test_odd_digits_and_endings_make_no_place_of_any_family(repo):
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
def test_no_name_makes_a_family_raise(name, other):
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
    ("stage2-ingredient2-step23842", {"stage": "stage2", "ingredient": 2, "step": 23_842}),
    ("stage2-step47684-mix-2T", {"stage": "stage2", "step": 47_684, "variant": "mix-2T"}),
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
    ("T/TinyLlama-1.1B-intermediate-step-1431k-3T", {"step": 1_431_000, "tokens": 3 * T}),
    ("TinyLlama-1.1B-intermediate-step-955k-token-2T", {"step": 955_000, "tokens": 2 * T}),
    ("TinyLlama-1.1B-intermediate-step-240k-503b", {"step": 240_000, "tokens": 503 * B}),
    ("stage1-step10-tokens2.5B", {"stage": "stage1", "step": 10, "tokens": 2_500_000_000}),
    ("main", {}),
    ("", {}),
]


def test_real_names_are_read_and_odd_digits_and_endings_make_a_named_checkpoint():
    for name, expected in READ:
        assert parse_name(name) == Place(name, **expected)
    for name in ("step10\n", "step\u0663", "step" + "9" * 5000):
        assert parse_name(name).named


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
def test_any_names_are_read_and_have_places_of_their_own_in_the_order(names):
    places = [parse_name(name) for name in names]
    assert [place.name for place in places] == names
    for place in places:
        assert all(n is None or n >= 0 for n in (place.step, place.tokens, place.index))
    keys = sorted(map(order, places))
    assert len(set(keys)) == len(set(names))


@pytest.mark.parametrize(
    ("expected", "stages"),
    [
        (
            "step5 stage1-step900 stage2-ingredient1-step100 stage2-ingredient1-step1000 "
            "stage2-ingredient2-step20 stage10-step1 lc-4k-to-32k-step-4000 "
            "lc-32k-to-64k-step-4000 it-SFT main",
            (),
        ),
        ("warm-step9 cool-step1 late-step2", ("warm", "cool")),
    ],
)
def test_stages_come_before_ingredients_and_these_before_steps(expected, stages):
    names = expected.split()
    assert sorted({*names}, key=lambda name: order(parse_name(name), stages)) == names
