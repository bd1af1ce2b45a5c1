"""Names in public use, each a row; and whatever else somebody may call a folder."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from qaudit.families.names import Place, order, parse_name

B, T = 10**9, 10**12

REAL = [
    ("step143000", {"step": 143_000}),
    ("step0", {"step": 0}),
    ("step512", {"step": 512}),
    ("step1000-tokens4B", {"step": 1000, "tokens": 4 * B}),
    ("step738020-tokens3095B", {"step": 738_020, "tokens": 3095 * B}),
    ("step2627139-tokens15T", {"step": 2_627_139, "tokens": 15 * T}),
    ("stage1-step1000-tokens5B", {"stage": "stage1", "step": 1000, "tokens": 5 * B}),
    ("stage1-step0-tokens0B", {"stage": "stage1", "step": 0, "tokens": 0}),
    ("stage1-step220000-tokens461B", {"stage": "stage1", "step": 220_000, "tokens": 461 * B}),
    (
        "stage2-ingredient1-step11931-tokens50B",
        {"stage": "stage2", "ingredient": 1, "step": 11_931, "tokens": 50 * B},
    ),
    ("stage1-step1413814", {"stage": "stage1", "step": 1_413_814}),
    ("stage2-ingredient2-step23842", {"stage": "stage2", "ingredient": 2, "step": 23_842}),
    (
        "stage2-step47684-mix-round5-from-2T-ckpt",
        {"stage": "stage2", "step": 47_684, "variant": "mix-round5-from-2T-ckpt"},
    ),
    ("stage1-step-40000", {"stage": "stage1", "step": 40_000}),
    ("lc-4k-to-32k-step-4000", {"stage": "lc-4k-to-32k", "step": 4000}),
    ("lc-32k-to-64k-step-20000", {"stage": "lc-32k-to-64k", "step": 20_000}),
    ("it-soup-APO", {}),
    ("it-LC-expert", {}),
    ("it-SFT", {}),
    ("it-mid-training", {}),
    ("step-125000", {"step": 125_000}),
    ("step-001000-2BT", {"step": 1000, "tokens": 2 * B}),
    ("ckpt_000", {"index": 0}),
    ("ckpt_358", {"index": 358}),
    ("CrystalCoder_phase1_checkpoint_055500", {"stage": "phase1", "step": 55_500}),
    ("iter_0002000", {"step": 2000}),
    ("iter_0480000", {"step": 480_000}),
    ("longctx-step125", {"stage": "longctx", "step": 125}),
    ("step0753851", {"step": 753_851}),
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
    ("master", {}),
    ("", {}),
]


def test_real_names_are_read() -> None:
    for name, expected in REAL:
        assert parse_name(name) == Place(name, **expected)


MALFORMED = st.one_of(
    st.text(),
    st.from_regex(
        re.compile(
            r"(stage|phase|ckpt|iter|step|ingredient|tokens|[-_/.]|[0-9]{1,30}|[KMBT]){0,12}"
        ),
        fullmatch=True,
    ),
    st.sampled_from([name for name, _ in REAL]).flatmap(
        lambda name: st.tuples(st.text(max_size=3), st.just(name), st.text(max_size=3)).map("".join)
    ),
)


@given(MALFORMED)
def test_no_name_is_refused_or_changed(name: str) -> None:
    place = parse_name(name)
    assert place.name == name
    assert all(n is None or n >= 0 for n in (place.step, place.tokens, place.index))


@given(st.lists(MALFORMED, max_size=6))
def test_any_names_can_be_put_in_order(names: list[str]) -> None:
    keys = sorted(order(parse_name(name)) for name in names)
    assert len(keys) == len(names)


@given(MALFORMED, MALFORMED)
def test_different_names_have_different_places_in_the_order(a: str, b: str) -> None:
    assert a == b or order(parse_name(a)) != order(parse_name(b))


def test_a_number_too_long_to_be_a_step_makes_a_named_checkpoint() -> None:
    assert parse_name("step" + "9" * 5000).named


def test_digits_of_other_scripts_are_no_numbers() -> None:
    assert parse_name("step\u0663").named


def test_a_newline_is_part_of_a_name() -> None:
    assert parse_name("step10\n").named


def in_order(names: list[str], stages: tuple[str, ...] = ()) -> list[str]:
    return sorted(names, key=lambda name: order(parse_name(name), stages))


def test_steps_sort_as_numbers() -> None:
    assert in_order(["step1000", "step200", "step30"]) == ["step30", "step200", "step1000"]


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
