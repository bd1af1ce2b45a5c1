"""Names in public use, each a row; and whatever else somebody may call a folder."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from qaudit.families.family import Place, order, parse_name

B, T = 10**9, 10**12

REAL = [
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
