"""Keyword arguments of the API: every name known, every size with its unit."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from qaudit.errors import RecipeError, UsageError
from qaudit.recipe.table import parse_nbytes, recipe_and_options, set_values, take
from qaudit.settings import GROUPS, PRESETS, Execution, Presets, Recipe, RunOptions, settings_of


def test_settings_are_split_into_what_to_measure_and_how() -> None:
    recipe, options = recipe_and_options(
        "a", Path("b"), calibration_documents=32, stream_memory="1.5GiB", out="here", last=None
    )
    assert recipe == Recipe(("a", "b"), calibration_documents=32)
    assert options == RunOptions(stream_memory=parse_nbytes("1.5GiB"), out=Path("here"))
    assert recipe_and_options("a") == (Recipe(("a",)), RunOptions())


@pytest.mark.parametrize(
    ("settings", "kind", "sentence", "hint"),
    [
        ({"contxt": 3}, UsageError, "there is no setting `contxt`", "did you mean `context`?"),
        ({"disk": "9GB"}, UsageError, "there is no setting `disk`", "schemes"),
        ({"context": "3"}, RecipeError, "`context` is `3`", "a whole number"),
        ({"update": 1}, UsageError, "`update` is `1`", "true or false"),
        ({"disk_budget": "60"}, UsageError, "`60` has no unit", "write `60GB` or `60MB`"),
        ({"disk_budget": 60}, UsageError, "`60` has no unit", "write `60GB` or `60MB`"),
        ({"stream_memory": "lots"}, UsageError, "`lots` is not a size", "512MB"),
        ({"stream_memory": "9" * 400}, UsageError, "more than any machine has", "512MB"),
    ],
)
def test_a_wrong_argument_is_named(
    settings: dict[str, object], kind: type[UsageError], sentence: str, hint: str
) -> None:
    with pytest.raises(kind) as caught:
        recipe_and_options("a", **settings)
    assert sentence in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1B", 1), ("512MB", 512e6), ("1.5 GiB", 1.5 * 2**30), ("2k", 2000)]
)
def test_a_size_has_a_unit(text: str, nbytes: float) -> None:
    assert parse_nbytes(text) == nbytes


def test_every_setting_has_help_and_a_default_to_show() -> None:
    assert len(settings_of()) == sum(len(settings_of(group)) for group in GROUPS)
    for group in GROUPS:
        assert {*settings_of(group)} == {f.name for f in fields(group)} - {"targets"}
    for entry in settings_of().values():
        assert entry.setting.help.endswith(".")
        assert entry.shown_default not in ("", "None", "()")


def test_a_preset_sets_several_keys_and_an_argument_beside_it_wins() -> None:
    recipe, _ = recipe_and_options("a", quick=True, calibration_documents=48)
    assert recipe == Recipe(("a",), **{**PRESETS["quick"], "calibration_documents": 48})
    assert (recipe.dtype, recipe.document_tokens, recipe.repeats) == ("fast", 512, 1)


def test_presets_are_keys_of_a_recipe() -> None:
    assert PRESETS.keys() == settings_of(Presets).keys()
    assert all(keys.keys() <= settings_of(Recipe).keys() for keys in PRESETS.values())


def test_texts_are_read_by_the_type_of_their_key() -> None:
    texts = [
        "context=8",
        "context=64",
        "packed=true",
        "confidence=0.9",
        "slurm=a",
        "slurm=b",
        "strata=a=b",
    ]
    texts += ["schedule={kind: linear, peak: 0.003, end: 1000}"]
    values = set_values(texts, [*settings_of()], "scan")
    assert values == {
        "context": 64, "packed": True, "confidence": 0.9, "slurm": ["a", "b"], "strata": "a=b",
        "schedule": {"kind": "linear", "peak": 0.003, "end": 1000},
    }  # fmt: skip
    assert take(Execution, values).slurm == ("a", "b")
    assert recipe_and_options("a", **values)[0].packed


@pytest.mark.parametrize(
    ("text", "sentence", "hint"),
    [
        ("contxt=3", "there is no setting `contxt`", "did you mean `context`?"),
        ("threads=3", "`qaudit scan` takes no `threads`", "context"),
        ("context", "`--set context` has no value", "`--set context=VALUE`"),
        ("context=long", "`context` is `long`", "a whole number from 2"),
        ("packed=2", "`packed` is `2`", "true or false"),
        ("confidence=high", "`confidence` is `high`", "a number"),
        ("schedule=[", "`schedule` is `[`", "a table"),
    ],
)
def test_a_wrong_text_is_named(text: str, sentence: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        set_values(text.split(), [*settings_of(Recipe)], "scan")
    assert sentence in caught.value.message
    assert hint in caught.value.hint
