"""Write the lists of names: what was seen is spelled out here, the rest follows from a rule.

    python -m tests.support.names.make

The Hub was not asked. A rule is one that its makers state, or one that every name seen obeys;
`SEEN` holds names from published sources that a rule must reproduce, and writing stops if it
does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import wrap

from tests.support.names import file_of

GIGA = 10**9


@dataclass(frozen=True)
class Series:
    """The names of one repository, and what is known of where they come from."""

    repo: str
    names: tuple[str, ...]
    seen: str
    rule: str
    sources: tuple[str, ...]
    unknown: str = ""


def steps(start: int, stop: int, spacing: int, *, without: Iterable[int] = ()) -> list[int]:
    """Return the steps from `start` to `stop`, both included where the spacing meets them."""
    return [step for step in range(start, stop + 1, spacing) if step not in set(without)]


def ceil_label(prefix: str, step: int, batch: int) -> str:
    """Return a name as OLMo 2 has it: the tokens of the stage, rounded up."""
    return f"{prefix}step{step}-tokens{math.ceil(step * batch / GIGA)}B"


# ------------------------------------------------------------------------------------- OLMo 2


def olmo2_1b() -> Series:
    """Return OLMo 2 1B."""
    batch = 2_097_152
    first = sorted({0, 300, 23_100, 66_200, 1_907_359, *steps(10_000, 1_900_000, 10_000)})
    names = [ceil_label("stage1-", step, batch) for step in first]
    for k in (1, 2, 3):
        second = [*steps(1000, 23_000, 1000), 23_852]
        names += [ceil_label(f"stage2-ingredient{k}-", step, batch) for step in second]
    names.insert(-1, "main")  # said to be the last step of ingredient 3
    return Series(
        "allenai/OLMo-2-0425-1B",
        tuple(names),
        "the steps of stage 1 in the official list; 7000, 19000 and 23852 of each ingredient.",
        "tokens are rounded up; ingredients are saved every 1000 steps, as in the larger sizes.",
        (
            "allenai/OLMo configs/official-0425/OLMo-2-0425-1B.csv",
            "aldakata/TrainingDynamicsQuantizationRobustness config/gptq",
        ),
        "the repository is said to have 267 references, one less than these.",
    )


def olmo2_1b_early() -> Series:
    """Return the first steps of OLMo 2 1B, in a repository of their own."""
    names = [ceil_label("stage1-", step, 2_097_152) for step in steps(0, 36_000, 1000)]
    return Series(
        "allenai/OLMo-2-0425-1B-early-training",
        (*names, "main"),
        "that there are 37, from step 0 to 36000.",
        "every 1000 steps, tokens rounded up.",
        ("https://huggingface.co/allenai/OLMo-2-0425-1B-early-training",),
        "whether `main` holds weights.",
    )


def olmo2_7b() -> Series:
    """Return OLMo 2 7B."""
    batch = 4_194_304
    gone = (100_000, 174_000, 317_000, 536_000, 605_000, 632_000, 672_000)
    odd = {150, 600, 700, 850, 900, 2150, 928_646}
    first = sorted(odd | set(steps(1000, 928_000, 1000, without=gone)))
    names = [ceil_label("stage1-", step, batch) for step in first]
    for k in (1, 2, 3):
        prefix = f"stage2-ingredient{k}-"
        names += [ceil_label(prefix, step, batch) for step in steps(1000, 11_000, 1000)]
        names.append(f"{prefix}step11931-tokens50B")  # a nominal count
    return Series(
        "allenai/OLMo-2-1124-7B",
        (*names, "main"),
        "that there are 965; the odd early steps; the steps that are missing; about 60 others.",
        "every 1000 steps, tokens rounded up; the last steps of stage 2 say 50B.",
        (
            "allenai/OLMo configs/official-1124",
            "aldakata/TrainingDynamicsQuantizationRobustness config/gptq",
        ),
    )


def olmo2_13b() -> Series:
    """Return OLMo 2 13B."""
    batch = 8_388_608
    first = sorted({102_500, 108_500, 320_700, 596_057, *steps(0, 596_000, 1000)})
    names = [ceil_label("stage1-", step, batch) for step in first]
    for k in (1, 2, 3):
        prefix = f"stage2-ingredient{k}-"
        names += [ceil_label(prefix, step, batch) for step in steps(1000, 11_000, 1000)]
        names += [f"{prefix}step11931-tokens100B", f"{prefix}step11931-tokens101B"]
    prefix = "stage2-ingredient4-"
    names += [ceil_label(prefix, step, batch) for step in steps(1000, 35_000, 1000)]
    names.append(f"{prefix}step35773-tokens300B")
    return Series(
        "allenai/OLMo-2-1124-13B",
        (*names, "main"),
        "33 names; both names of the last step of ingredients 1 to 3; the steps of stage 2.",
        "stage 1 every 1000 steps, tokens rounded up; last steps of stage 2 nominal.",
        (
            "allenai/OLMo configs/official-1124",
            "https://github.com/allenai/OLMo/issues/842",
            "aldakata/TrainingDynamicsQuantizationRobustness config/gptq",
        ),
        "the official list of stage 1 has 690 steps, about 90 of them between those here.",
    )


def olmo2_32b() -> Series:
    """Return OLMo 2 32B."""
    batch = 8_388_608
    first = sorted({5001, 5471, 19_731, 721_901, *steps(1000, 721_000, 1000)})
    names = [ceil_label("stage1-", step, batch) for step in first]
    short = [*steps(1000, 11_000, 1000), 11_500, 11_921]
    long = [*steps(1000, 35_000, 1000), 35_500, 35_763]
    for k, second in ((1, short), (2, short), (3, long), (4, [11_921])):
        names += [ceil_label(f"stage2-ingredient{k}-", step, batch) for step in second]
    return Series(
        "allenai/OLMo-2-0325-32B",
        (*names, "main"),
        "40 names, 4 ingredients among them; the official steps of ingredients 1 and 2.",
        "stage 1 and ingredient 3 every 1000 steps, tokens rounded up.",
        (
            "allenai/OLMo configs/official-0325",
            "aldakata/TrainingDynamicsQuantizationRobustness config/gptq",
        ),
        "about 20 odd steps of stage 1; whether ingredient 4 has more than its last step.",
    )


# ------------------------------------------------------------------------------ OLMo 1 and 3

# Of OLMo 1B: complete from step 68000 on; thousands, with single steps at their place.
OLMO_1B = """
1-5 10 20 30 40 50 63 68-71 80 90 95-106 110-117 117.85 330-337 337.7 340 342-349 349.35 350
353-360 360.85 364-371 371.9 373-381 385-392 392.55 397-404 404.15 405-410 413-420 420.65
424-431 431.9 436-443 443.4 444-448 450 452-459 459.4 460 463-470 470.75 475-482 482.05 486-490
492-493 493.05 497-504 504.2 505 509-516 516.25 520-527 527.15 530-538 538.1 540 542-549 549.7
550 554-561 561.25 565-572 572.85 577-584 584.55 589-596 596.1 597-601 605-612 612.65 615-624
624.15 628-635 635.85 636-639 639.65 640 650 660 680 690 693-701 710 720 730-738 738.02
"""


def olmo_1b_steps() -> list[int]:
    """Return the steps of OLMo 1B that were seen."""
    found: list[int] = []
    for word in OLMO_1B.split():
        if "-" in word:
            first, last = word.split("-")
            found += steps(1000 * int(first), 1000 * int(last), 1000)
        else:
            found.append(round(1000 * float(word)))
    return found


def olmo_1b() -> Series:
    """Return OLMo 1B as it was first released."""
    names = [f"step{step}-tokens{round(step * 4_194_304 / GIGA)}B" for step in olmo_1b_steps()]
    return Series(
        "allenai/OLMo-1B",
        (*names, "main"),
        "all but the first: a list in public code has these from step 68000 on.",
        "tokens are rounded to the nearest.",
        (
            "https://huggingface.co/allenai/OLMo-1B",
            "https://github.com/allenai/OLMo/issues/879",
        ),
        "most of the steps before 68000.",
    )


def floor_label(step: int) -> str:
    """Return a name as the -hf repositories of OLMo 1 have it: what every name seen obeys."""
    return f"step{step}-tokens{math.floor(step * 4_192_600 / GIGA)}B"


def olmo_1b_hf() -> Series:
    """Return OLMo 1B in the format of transformers."""
    return Series(
        "allenai/OLMo-1B-hf",
        (*map(floor_label, olmo_1b_steps()), "main"),
        "16 names, from step 1000 to 738020; that there are none between 117850 and 330000.",
        "steps as in allenai/OLMo-1B; tokens by a fit to the names seen.",
        ("https://github.com/allenai/OLMo/issues/879",),
        "the repository is said to have 351 references.",
    )


def olmo_7b(repo: str, unknown: str) -> Series:
    """Return OLMo 7B, in either format."""
    names = [
        f"step{step}-tokens{round(step * 4_423_680 / GIGA)}B" for step in steps(0, 557_000, 1000)
    ]
    names.insert(-1, "main")  # said to be step 557000
    return Series(
        repo,
        tuple(names),
        "17 names of allenai/OLMo-7B, from step 0 to 557000.",
        "every 1000 steps, as its card says; tokens by a fit to the names seen.",
        (
            "https://huggingface.co/allenai/OLMo-7B",
            "https://huggingface.co/allenai/OLMo-7B/discussions/15",
        ),
        unknown,
    )


def olmo_7b_0424() -> Series:
    """Return OLMo 7B of April 2024."""
    return Series(
        "allenai/OLMo-7B-0424-hf",
        (*map(floor_label, [*steps(0, 651_000, 1000), 651_581]), "main"),
        "the names from step 291000 to 367000, in public code, and step651581-tokens2731B.",
        "every 1000 steps; tokens by a fit to the names seen.",
        ("https://huggingface.co/allenai/OLMo-7B-0424-hf",),
        "about 820 references are reported, more than these, and a few that were lost.",
    )


def olmo_7b_0724() -> Series:
    """Return OLMo 7B of July 2024."""
    return Series(
        "allenai/OLMo-7B-0724-hf",
        (*map(floor_label, steps(0, 651_000, 1000)), "main"),
        "none but `main` for certain.",
        "as in the repository of 0424, where its card says that the revisions are.",
        ("https://huggingface.co/allenai/OLMo-7B-0724-hf",),
        "which revisions this repository really has.",
    )


def olmo_1b_0724() -> Series:
    """Return OLMo 1B of July 2024."""
    names = [
        f"step{step}-tokens{math.floor(step * 512 * 4095 / GIGA)}B"
        for step in steps(0, 1_454_000, 1000)
    ]
    return Series(
        "allenai/OLMo-1B-0724-hf",
        (*names, "main"),
        "about 10 names, the first and the last among them; that there are 1446.",
        "every 1000 steps; tokens by a fit to the names seen.",
        ("https://huggingface.co/allenai/OLMo-1B-0724-hf",),
        "which ten of these are not there.",
    )


def olmo3_7b() -> Series:
    """Return Olmo 3 7B."""
    names = [f"stage1-step{step}" for step in [*steps(0, 1_413_000, 1000), 1_413_814]]
    names += [f"stage2-step{step}" for step in [*steps(1000, 47_000, 1000), 47_684]]
    mixes = ("gen-mc-only", "math-code-reasoning-web", "round5")
    names += [f"stage2-step47684-mix-{mix}-from-2T-ckpt" for mix in mixes]
    names += [f"stage3-step{step}" for step in [*steps(1000, 11_000, 1000), 11_921]]
    names.insert(-1, "main")  # said to be the last step of stage 3
    return Series(
        "allenai/Olmo-3-1025-7B",
        tuple(names),
        "about 20 names, the three ablations among them; how long the official lists are.",
        "every 1000 steps, and the last of each stage, as in the official lists: 1415, 48, 12.",
        ("allenai/OLMo-core src/scripts/official/OLMo3",),
        "a count of the branches has 6 more of stage 1, and one more of stages 2 and 3.",
    )


def olmo3_32b() -> Series:
    """Return Olmo 3 32B."""
    names = [f"stage1-step{step}" for step in steps(1000, 656_000, 1000)]
    for k in (1, 2):
        second = [*steps(1000, 23_000, 1000), 23_842]
        names += [f"stage2-ingredient{k}-step{step}" for step in second]
    names += [f"stage3-step{step}" for step in [*steps(1000, 11_000, 1000), 11_921]]
    return Series(
        "allenai/Olmo-3-1125-32B",
        (*names, "main"),
        "the last steps of each stage; that the official list has 680, 24, 24 and 12.",
        "every 1000 steps, and the last of each stage.",
        ("allenai/OLMo-core src/scripts/official/OLMo3",),
        "a count of the branches has 655 of stage 1; what the two soups are called.",
    )


# -------------------------------------------------------------------- OLMoE and OLMo Hybrid


def olmoe_0924() -> Series:
    """Return OLMoE 1B-7B of September 2024."""
    names = [
        f"step{step}-tokens{step * 4_194_304 // GIGA}B" for step in steps(5000, 1_220_000, 5000)
    ]
    return Series(
        "allenai/OLMoE-1B-7B-0924",
        (*names, "main"),
        "12 names, from step 5000 to 1220000; that there are 244 of the pretraining.",
        "every 5000 steps, as its configuration has it and that count needs; tokens rounded down.",
        (
            "allenai/OLMo configs/official/OLMoE-1B-7B-0824.yml",
            "https://huggingface.co/allenai/OLMoE-1B-7B-0924",
            "arXiv 2409.02060",
        ),
        "whether there are branches beside these and `fp32`, which is `main` in float32.",
    )


def olmo_hybrid() -> Series:
    """Return OLMo Hybrid 7B."""
    first = sorted({1_413_500, 1_414_078, *steps(0, 1_414_000, 1000)})
    second = [*steps(1000, 23_000, 1000), 23_500, 23_842]
    names = [f"stage1-step{step}" for step in first]
    names += [f"stage2-ingredient{k}-step{step}" for k in (1, 2) for step in second]
    names += ["stage2-ingredient1+2-step23842", *(f"stage3-step{step}" for step in second)]
    return Series(
        "allenai/Olmo-Hybrid-7B",
        (*names, "main"),
        "the first 146 and last 21 steps of stage 1 and all others in the official list; 2 names.",
        "stage 1 every 1000 steps.",
        (
            "allenai/OLMo-core src/scripts/official/OLMo-hybrid/OLMo-hybrid-0326-7B.csv",
            "https://huggingface.co/allenai/Olmo-Hybrid-7B",
        ),
        "by its length, the official list has about 15 further steps of stage 1.",
    )


# ------------------------------------------------------------------------ SmolLM and Apertus


def smollm3() -> Series:
    """Return SmolLM3 3B."""
    names = [f"stage1-step-{step}" for step in steps(40_000, 3_440_000, 40_000)]
    names += [f"stage2-step-{step}" for step in steps(3_480_000, 4_200_000, 40_000)]
    names += [f"stage3-step-{step}" for step in steps(4_240_000, 4_720_000, 40_000)]
    for stage in ("lc-4k-to-32k", "lc-32k-to-64k"):
        names += [f"{stage}-step-{step}" for step in steps(4000, 20_000, 4000)]
    names += ["it-mid-training", "it-SFT", "it-soup-APO", "it-LC-expert"]
    return Series(
        "HuggingFaceTB/SmolLM3-3B-checkpoints",
        (*names, "main"),
        "51 names; that there are 133.",
        "every 40000 steps, and every 4000 of the long context, which gives that count.",
        (
            "huggingface/smollm text/pretraining/smollm3",
            "aldakata/TrainingDynamicsQuantizationRobustness config/gptq",
        ),
    )


def smollm2(size: str, spacing: int, count: int, seen: str) -> Series:
    """Return SmolLM2, one of its sizes."""
    repo = f"HuggingFaceTB/SmolLM2-{size}-intermediate-checkpoints"
    names = [f"step-{step}" for step in steps(spacing, spacing * count, spacing)]
    return Series(
        repo,
        (*names, "main"),
        seen,
        f"every {spacing} steps.",
        ("huggingface/smollm text/pretraining/smollm2", f"https://huggingface.co/{repo}"),
    )


def apertus(size: str, names: Iterable[str], longctx: list[int], rule: str) -> Series:
    """Return Apertus, one of its sizes."""
    return Series(
        f"swiss-ai/Apertus-{size}-2509",
        (*names, *(f"longctx-step{step}" for step in longctx), "main"),
        "every name of the pretraining, in public lists.",
        rule,
        (f"https://huggingface.co/swiss-ai/Apertus-{size}-2509", "arXiv 2509.14233"),
    )


def apertus_8b() -> Series:
    """Return Apertus 8B."""
    early = [(step, step * 42 // 10_000) for step in steps(50_000, 1_000_000, 50_000)]
    odd = [(1_194_000, 5014), (1_432_000, 6014), (1_670_000, 7014), (1_678_000, 7047)]
    late = [
        (step, 7232 + (step - 1_700_000) * 84 // 10_000)
        for step in steps(1_700_000, 2_600_000, 50_000)
    ]
    names = [f"step{step}-tokens{told}B" for step, told in (*early, *odd, *late)]
    return apertus(
        "8B",
        (*names, "step2627139-tokens15T"),
        steps(125, 3375, 125),
        "longctx: the first is step 125 and there are 27, so that 125 is taken for the spacing.",
    )


def apertus_70b() -> Series:
    """Return Apertus 70B."""
    early = [(step, step * 84 // 10_000) for step in steps(25_000, 500_000, 25_000)]
    late = [
        (step, 4420 + (step - 525_000) * 168 // 10_000)
        for step in steps(525_000, 1_150_000, 25_000)
    ]
    names = [f"step{step}-tokens{told}B" for step, told in (*early, *late)]
    return apertus(
        "70B",
        (*names, "step1155828-tokens15T"),
        steps(50, 1700, 50),
        "none: longctx was seen too, every 50 steps.",
    )


# --------------------------------------------------------------------------------- the others


def open_sci(repo: str, last: int, seen: str) -> Series:
    """Return one run of open-sci-ref."""
    return Series(
        f"open-sci/open-sci-ref-v0.01-{repo}",
        (*(f"iter_{step:07d}" for step in steps(2000, last, 2000)), "main"),
        seen,
        "every 2000 steps.",
        (
            "LAION-AI/open-sci-ref-0.01 README.md",
            "aldakata/TrainingDynamicsQuantizationRobustness config/gptq",
        ),
        "whether the very last step has a name of its own beside `main`.",
    )


def amber() -> Series:
    """Return Amber."""
    return Series(
        "LLM360/Amber",
        (*(f"ckpt_{k:03d}" for k in range(359)), "main"),
        "37 names; that there are 360, from ckpt_000 to ckpt_358 and `main`.",
        "every number between them.",
        ("https://huggingface.co/LLM360/Amber",),
    )


def crystal() -> Series:
    """Return Crystal."""
    places = [(1, step) for step in steps(1500, 79_500, 1500)]
    places += [(2, step) for step in steps(3000, 213_000, 3000)]
    names = [f"CrystalCoder_phase{phase}_checkpoint_{step:06d}" for phase, step in places]
    return Series(
        "LLM360/Crystal",
        (*names, "CrystalCoder_phase3_checkpoint_027728", "main"),
        "12 names; that there are 250 branches, older names `mdl_phase*_step_*` among them.",
        "every 1500 steps of phase 1 and 3000 of phase 2, which every name seen obeys.",
        ("https://huggingface.co/LLM360/Crystal",),
        "the older names one by one; what there is of phase 3 before its end.",
    )


def k2() -> Series:
    """Return K2."""
    return Series(
        "LLM360/K2",
        (*(f"ckpt_{k:03d}" for k in range(359)), "main"),
        "the form of the names; that the run was cut into 360 parts.",
        "every number, as in LLM360/Amber.",
        ("LLM360/k2-train", "arXiv 2501.07124"),
        "which numbers there are: a summary of the paper counts 140.",
    )


def pythia() -> Series:
    """Return Pythia, any of its sizes."""
    first = [0, *(2**k for k in range(10)), *steps(1000, 143_000, 1000)]
    names = [f"step{step}" for step in first]
    names.insert(-1, "main")  # the same as step143000
    return Series(
        "EleutherAI/pythia-160m",
        tuple(names),
        "all: the README gives them, for every size.",
        "0, the powers of two to 512, every 1000 to 143000: 154.",
        ("EleutherAI/pythia README.md",),
    )


SERIES = (
    olmo2_1b(),
    olmo2_1b_early(),
    olmo2_7b(),
    olmo2_13b(),
    olmo2_32b(),
    olmo_1b(),
    olmo_1b_hf(),
    olmo_7b("allenai/OLMo-7B", "which of the 557 are missing, if any."),
    olmo_7b("allenai/OLMo-7B-hf", "its own names: tokens differ by one between other twins."),
    olmo_7b_0424(),
    olmo_7b_0724(),
    olmo_1b_0724(),
    olmo3_7b(),
    olmo3_32b(),
    olmoe_0924(),
    olmo_hybrid(),
    smollm3(),
    smollm2("1.7B", 125_000, 41, "the first and the last; that there are 41."),
    smollm2("360M", 160_000, 16, "the first; 16 fit the length of the run."),
    smollm2("135M", 240_000, 8, "the first and the last; that there are 8."),
    apertus_8b(),
    apertus_70b(),
    open_sci("1.7b-nemotron-hq-1T-4096", 242_000, "31 names, from iter_0058000 to iter_0242000."),
    open_sci("1.7b-c4-300B-4096", 72_000, "that a run of 300B tokens has 36 and `main`."),
    amber(),
    crystal(),
    k2(),
    pythia(),
)

SEEN = {
    "allenai/OLMo-2-0425-1B": """stage1-step40000-tokens84B stage1-step330000-tokens693B
        stage1-step1410000-tokens2957B stage1-step1590000-tokens3335B
        stage1-step1907359-tokens4001B stage2-ingredient1-step7000-tokens15B
        stage2-ingredient2-step19000-tokens40B stage2-ingredient3-step23852-tokens51B""",
    "allenai/OLMo-2-1124-7B": """stage1-step150-tokens1B stage1-step600-tokens3B
        stage1-step900-tokens4B stage1-step2000-tokens9B stage1-step35000-tokens147B
        stage1-step257000-tokens1078B stage1-step498000-tokens2089B
        stage1-step928646-tokens3896B stage2-ingredient3-step1000-tokens5B
        stage2-ingredient1-step7000-tokens30B stage2-ingredient2-step11000-tokens47B
        stage2-ingredient1-step11931-tokens50B""",
    "allenai/OLMo-2-1124-13B": """stage1-step38000-tokens319B stage1-step108500-tokens911B
        stage1-step320700-tokens2691B stage1-step596057-tokens5001B
        stage2-ingredient2-step2000-tokens17B stage2-ingredient1-step11000-tokens93B
        stage2-ingredient4-step31000-tokens261B stage2-ingredient4-step35773-tokens300B""",
    "allenai/OLMo-2-0325-32B": """stage1-step17000-tokens143B stage1-step596000-tokens5000B
        stage1-step721901-tokens6056B stage2-ingredient1-step9000-tokens76B
        stage2-ingredient3-step35500-tokens298B stage2-ingredient3-step35763-tokens301B
        stage2-ingredient4-step11921-tokens101B""",
    "allenai/OLMo-1B": """step1000-tokens4B step117850-tokens494B step337700-tokens1416B
        step466000-tokens1955B step601000-tokens2521B step738020-tokens3095B""",
    "allenai/OLMo-1B-hf": """step1000-tokens4B step4000-tokens16B step5000-tokens20B
        step10000-tokens41B step20000-tokens83B step40000-tokens167B step80000-tokens335B
        step110000-tokens461B step117850-tokens494B step330000-tokens1383B
        step460000-tokens1928B step620000-tokens2599B step640000-tokens2683B
        step720000-tokens3018B step738000-tokens3094B step738020-tokens3094B""",
    "allenai/OLMo-7B": """step0-tokens0B step10000-tokens44B step50000-tokens221B
        step150000-tokens664B step350000-tokens1548B step452000-tokens2000B
        step550000-tokens2433B step556000-tokens2460B step557000-tokens2464B""",
    "allenai/OLMo-7B-0424-hf": """step291000-tokens1220B step300000-tokens1257B
        step317000-tokens1329B step326000-tokens1366B step367000-tokens1538B
        step651581-tokens2731B""",
    "allenai/OLMo-1B-0724-hf": "step0-tokens0B step1454000-tokens3048B",
    "allenai/OLMoE-1B-7B-0924": """step5000-tokens20B step10000-tokens41B step25000-tokens104B
        step50000-tokens209B step100000-tokens419B step200000-tokens838B step400000-tokens1677B
        step500000-tokens2097B step600000-tokens2516B step800000-tokens3355B
        step1200000-tokens5033B step1220000-tokens5117B""",
    "allenai/Olmo-Hybrid-7B": "stage2-ingredient1+2-step23842 stage3-step1000",
    "HuggingFaceTB/SmolLM3-3B-checkpoints": """stage1-step-40000 stage2-step-3480000
        stage3-step-4360000 stage3-step-4720000 lc-32k-to-64k-step-16000 it-soup-APO""",
    "swiss-ai/Apertus-8B-2509": """step50000-tokens210B step1000000-tokens4200B
        step1670000-tokens7014B step1700000-tokens7232B step1950000-tokens9332B
        step2450000-tokens13532B step2600000-tokens14792B step2627139-tokens15T""",
    "swiss-ai/Apertus-70B-2509": """step25000-tokens210B step525000-tokens4420B
        step875000-tokens10300B step1150000-tokens14920B step1155828-tokens15T
        longctx-step1700""",
    "LLM360/Crystal": """CrystalCoder_phase1_checkpoint_055500
        CrystalCoder_phase1_checkpoint_064500 CrystalCoder_phase2_checkpoint_018000
        CrystalCoder_phase2_checkpoint_207000 CrystalCoder_phase3_checkpoint_027728""",
}
"""Names from published sources that the rules above must give."""


def text(series: Series) -> str:
    """Return a series' file: a header of comments, then one name a line."""
    for name in SEEN.get(series.repo, "").split():
        assert name in series.names, f"{series.repo}: the rule does not give {name}"
    assert len(set(series.names)) == len(series.names), series.repo
    said = [
        f"{series.repo}: {len(series.names)} branches, in the order of the run.",
        f"Seen: {series.seen}",
        f"By rule: {series.rule}",
        *([f"Not known: {series.unknown}"] if series.unknown else []),
        f"Sources: {'; '.join(series.sources)}.",
    ]
    header = [line for part in said for line in wrap(part, 98, break_on_hyphens=False)]
    return "\n".join([*(f"# {line}" for line in header), *series.names]) + "\n"


if __name__ == "__main__":
    for series in SERIES:
        file_of(series.repo).write_text(text(series), encoding="utf-8")
