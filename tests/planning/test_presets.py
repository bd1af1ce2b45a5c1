"""What `--quick` and `--thorough` would take, beside the price of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qaudit.core.registry import parse_schemes
from qaudit.planning.passes import Pricing
from qaudit.planning.presets import preset_times
from qaudit.planning.sizes import Sizes, TextSize
from qaudit.settings import DEFAULT_SCHEMES, PRESETS
from qaudit.types import PresetTime, Price, Recipe
from tests.support import sample

SIZES = Sizes(134_515_008, 30, 3_540_096, 28_311_552, 576, 1536, 49_152)
TEXT = TextSize(64 * 2048, 64 * 2048, 2048)


def times(recipe: Recipe, text: TextSize = TEXT) -> dict[str, PresetTime]:
    pricing = Pricing(SIZES, text, Price())
    schemes = parse_schemes(recipe.schemes)
    found = preset_times(recipe, sample.series()[:4], schemes, pricing, ("cpu", "float32"))
    return {time.name: time for time in found}


def recipe(**changes: Any) -> Recipe:
    return replace(Recipe(("folder",)), **changes)


def test_the_quick_preset_is_cheaper_and_the_thorough_one_dearer_than_the_plan() -> None:
    both = times(recipe())
    assert 10 * both["quick"].seconds_low < both["thorough"].seconds_low
    assert both["quick"].seconds_high <= 4.001 * both["quick"].seconds_low


def test_what_was_chosen_stays_as_it_is() -> None:
    chosen = times(recipe(schemes=("rtn-4bit",), document_tokens=128))
    assert chosen["quick"].seconds_low < times(recipe())["quick"].seconds_low
    assert recipe().schemes == DEFAULT_SCHEMES


def test_short_documents_are_not_priced_as_long_ones() -> None:
    short = times(recipe(), TextSize(64 * 100, 64 * 100, 2048))
    assert short["quick"].seconds_low < times(recipe())["quick"].seconds_low / 3


def test_a_plan_that_follows_a_preset_names_none() -> None:
    assert not times(recipe(**PRESETS["quick"]))


def test_a_preset_that_would_change_nothing_is_left_out() -> None:
    assert set(times(recipe(**(PRESETS["quick"] | {"repeats": 3})))) == {"thorough"}
