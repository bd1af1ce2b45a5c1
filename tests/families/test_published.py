"""Learning rates and tokens of real revisions, through the family files.

Two rows are printed in the trainers' own configurations (OLMo 2 1B and 7B, at the end of stage
1). The others were computed elsewhere from the same published inputs: they hold what the files
say against slips of the pen, not against what the trainers logged.
"""

from __future__ import annotations

import pytest

from qaudit.families import load
from tests.support.names import family_of

RATES = [
    ("olmo2-1b", "stage1-step1907359-tokens4001B", 7.448729e-05),
    ("olmo2-1b", "stage2-ingredient1-step12000-tokens26B", 3.699647e-05),
    ("olmo2-7b", "stage1-step928000-tokens3893B", 6.149879e-05),
    ("olmo2-7b", "stage1-step1000-tokens5B", 1.5e-04),
    ("olmo2-13b", "stage1-step596057-tokens5001B", 9.0e-05),
    ("olmo2-13b", "stage2-ingredient4-step20000-tokens168B", 3.966835e-05),
    ("olmo2-32b", "stage1-step721901-tokens6056B", 6.623217e-05),
    ("olmo3-7b", "stage1-step597046", 1.65e-04),
    ("olmo3-7b", "stage1-step1413814", 3.932522e-05),
    ("olmo-1b", "step369000-tokens1548B", 2.212762e-04),
    ("olmo-1b", "step738020-tokens3095B", 4.000280e-05),
    ("smollm3", "stage3-step-4200000", 1.992341e-04),
    ("smollm3", "stage3-step-4480000", 9.195441e-05),
    ("smollm3", "lc-4k-to-32k-step-4000", 1.879474e-05),
    ("smollm3", "lc-32k-to-64k-step-4000", 1.900969e-05),
    ("smollm2-1.7b", "step-4750000", 4.675573e-04),
    ("smollm2-1.7b", "step-5125000", 1.097328e-04),
    ("olmoe-0924", "step5000-tokens20B", 3.999961e-4),
    ("olmoe-0924", "step1220000-tokens5117B", 4.0e-5),  # 5T tokens are passed
    ("olmoe-0125", "step600000-tokens2516B", 2.187148e-4),
    ("olmoe-0125", "stage2-ingredient2-step11921-tokens51B", 2.0e-5),
    ("olmo-hybrid", "stage1-step2000", 3.0e-4),
    ("olmo-hybrid", "stage1-step708039", 1.65e-4),
    ("apertus-8b", "step50000-tokens210B", 1.1e-4),
    ("apertus-8b", "step2429920", 1.098802e-4),
    ("apertus-8b", "step2600000-tokens14792B", 1.806368e-5),
    ("apertus-70b", "step1100000", 4.071994e-6),
    ("apertus-70b", "step1150000-tokens14920B", 1.270039e-6),
    ("open-sci-1t", "iter_0190000", 4e-3),
    ("open-sci-1t", "iter_0242000", 1.684558e-5),
    ("open-sci-300b", "iter_0060000", 3.484999e-3),
    ("open-sci-300b", "iter_0072000", 1.819433e-4),
    ("amber", "ckpt_000", 1.143e-4),
    ("amber", "ckpt_100", 2.525878e-4),
    ("amber", "ckpt_358", 3.000522e-5),
    ("pythia-160m", "step512", 2.148252e-4),
    ("pythia-160m", "step10000", 5.946985e-4),
    ("pythia-160m", "step143000", 6e-5),
    # An annealing ends at zero.
    ("smollm3", "stage3-step-4720000", 0),
    ("smollm3", "lc-4k-to-32k-step-20000", 0),  # stops a step early
    ("olmo2-7b", "stage2-ingredient1-step11931-tokens50B", 0),
    ("olmo2-13b", "stage2-ingredient1-step11931-tokens100B", 0),
    ("olmo2-13b", "stage2-ingredient4-step35773-tokens300B", 0),
    ("olmo2-32b", "stage2-ingredient4-step11921-tokens101B", 0),
    ("olmo2-32b", "stage2-ingredient3-step35763-tokens301B", 0),
    ("olmo-7b", "main", 0),
    ("olmo3-7b", "main", 0),
    ("olmo-hybrid", "stage2-ingredient2-step23842", 0),
    ("olmoe-0125", "stage2-ingredient3-step23842-tokens101B", 0),
    ("olmoe-0924", "main", 0),
    # Each size has its own peak, and a repository's name overrides the schedule only there.
    ("EleutherAI/pythia-14m", "step1430", 1e-3),
    ("EleutherAI/pythia-31m", "step1430", 1e-3),
    ("EleutherAI/pythia-70m-deduped", "step1430", 1e-3),
    ("EleutherAI/pythia-160m-seed3", "step1430", 6e-4),
    ("EleutherAI/pythia-410m", "step1430", 3e-4),
    ("EleutherAI/pythia-1b-deduped", "step1430", 2.5e-4),
    ("EleutherAI/pythia-1.4b", "step1430", 2e-4),
    ("EleutherAI/pythia-2.8b", "step1430", 1.6e-4),
    ("EleutherAI/pythia-6.9b", "step1430", 1.2e-4),
    ("EleutherAI/pythia-12b-deduped", "step1430", 1.2e-4),
    ("open-sci/open-sci-ref-v0.01-0.4b-c4-300B-4096-lr0.006-2", "iter_0030000", 6e-3),
    ("open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096", "iter_0030000", 4e-3),
    ("open-sci/open-sci-ref-v0.01-1.7b-c4-300B-4096", "iter_0030000", 4e-3),
    ("open-sci/open-sci-ref-v0.01-1.7b-c4-300B-4096-warmup5000", "iter_0004000", 3.2e-3),
    ("open-sci-300b", "iter_0004000", 6.4e-4),
    ("HuggingFaceTB/SmolLM2-1.7B-intermediate-checkpoints", "step-125000", 5e-4),
    ("HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints", "step-160000", 3e-3),
    ("HuggingFaceTB/SmolLM2-135M-intermediate-checkpoints", "step-240000", 3e-3),
]

FIVE_DIGITS = [
    ("apertus-8b", "step2627139-tokens15T", 1.10001e-5),
    ("apertus-70b", "step1057219", 9.9891e-6),
]

# What a family's makers say the run had seen, from its very start: with the tokens of a step.
TOKENS = [
    ("olmo-1b", "step738020-tokens3095B", 738_020 * 2048 * 2048),
    ("olmo2-1b", "stage1-step1907359-tokens4001B", 1_907_359 * 512 * 4096),
    (
        "olmo2-1b",
        "stage2-ingredient3-step23852-tokens51B",
        (1_907_359 + 23_852) * 512 * 4096,
    ),
    ("olmo2-7b", "stage1-step1000-tokens5B", 1000 * 1024 * 4096),
    ("olmo2-7b", "stage2-ingredient3-step11931-tokens50B", (928_646 + 11_931) * 1024 * 4096),
    ("olmo2-13b", "stage2-ingredient4-step35773-tokens300B", (596_057 + 35_773) * 2048 * 4096),
    ("olmo3-7b", "stage2-step1000", 1_413_814 * 2**22 + 1000 * 2**21),
    ("olmo3-7b", "main", 1_413_814 * 2**22 + 47_684 * 2**21 + 11_921 * 2**22),
    ("olmoe-0924", "step1200000-tokens5033B", 1_200_000 * 1024 * 4096),
    ("olmoe-0924", "main", (1_200_000 + 23_842) * 1024 * 4096),
    ("smollm3", "stage3-step-4720000", 4_720_000 * 192 * 3 * 4096),  # 11.1T: data stages count on
    ("smollm2-360m", "step-160000", 160_000 * 1_572_864),
    ("apertus-8b", "step1700000-tokens7232B", 4096 * (1_678_000 * 1024 + 22_000 * 2048)),
    ("apertus-70b", "step525000-tokens4420B", 4096 * (523_518 * 2048 + 1482 * 4096)),
    ("open-sci-1t", "iter_0242000", 242_000 * 1008 * 4096),
    ("amber", "main", 360 * 762 * 2240 * 2048),
    ("pythia-160m", "main", 143_000 * 2_097_152),
]


def rate(family: str, name: str) -> float | None:
    found = family_of(family) if "/" in family else load(family)
    return found.learning_rate(found.place(name))


def test_learning_rates_and_tokens_of_revisions_are_those_that_were_published() -> None:
    for family, name, expected in RATES:  # written with seven digits
        assert rate(family, name) == pytest.approx(expected, rel=1e-6, abs=1e-9), (family, name)
    for family, name, expected in FIVE_DIGITS:
        assert rate(family, name) == pytest.approx(expected, rel=1e-5), (family, name)
    for family, name, expected in TOKENS:
        assert load(family).tokens(load(family).place(name)) == expected, (family, name)


def test_the_two_halves_of_a_lengthened_cosine_meet() -> None:
    first, second = (piece.schedule() for piece in load("olmo3-7b").stages[0].lr)
    where = 597_046 * 4_194_304
    assert first.at(where) == pytest.approx(second.at(where), rel=1e-5)


UNPUBLISHED = [
    ("olmo-1b-0724", "step954000-tokens2000B"),
    ("olmo3-32b", "stage1-step5000"),
    ("olmo-7b-0424", "step700000"),
    ("open-sci-50b", "iter_0002000"),
    ("pythia-v0", "step1000"),
    ("olmo2-13b", "main"),
    ("olmo3-7b", "stage2-step47684-mix-round5-from-2T-ckpt"),  # not of this run
    ("k2", "ckpt_100"),
    ("open-sci", "iter_0002000"),
    ("smollm3", "it-SFT"),
]


def test_what_nobody_published_stays_unknown() -> None:
    for family, name in UNPUBLISHED:
        assert rate(family, name) is None, name
    for family, name in (
        *UNPUBLISHED[6:],
        ("smollm3", "lc-4k-to-32k-step-4000"),
        ("apertus-8b", "longctx-step125"),
        ("crystal", "CrystalCoder_phase2_checkpoint_001000"),
    ):
        assert load(family).tokens(load(family).place(name)) is None, name
