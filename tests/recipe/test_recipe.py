"""Recipes: every key checked, every wrong one named; soups resolved or refused by name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from qaudit.core.registry import parse_merge, parse_schemes
from qaudit.errors import RecipeError, UsageError
from qaudit.recipe.selection import select
from qaudit.recipe.soups import SoupRequest, needed, parse_soup, resolve_soups
from qaudit.recipe.table import read_recipe, recipe_of, recipes_folder
from qaudit.settings import DEFAULT_SCHEMES, settings_of
from qaudit.types import Checkpoint, Recipe, Ref, WeightFile

DEMO = read_recipe(recipes_folder() / "demo.yaml")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def checkpoint(label: str, weights: str | None = None) -> Checkpoint:
    return Checkpoint(Ref(label), label, (WeightFile("w", 1, weights or label),))


SERIES = tuple(
    checkpoint(label)
    for label in (
        "stage1-step500",
        "stage2-ingredient1-step500",
        "stage2-ingredient1-step1000",
        "stage2-ingredient2-step1000",
        "stage2-ingredient3-step1000",
    )
)


# ----------------------------------------------------------------------------------------- keys


def test_options_alone_make_a_recipe() -> None:
    recipe = recipe_of(targets=["a", "b"], schemes=["rtn-4bit,gptq-3bit"], context=None)
    assert recipe == Recipe(("a", "b"), ("rtn-4bit,gptq-3bit",))


def test_what_is_not_asked_for_has_its_default() -> None:
    recipe = recipe_of(targets=["a"])
    assert recipe == Recipe(("a",), DEFAULT_SCHEMES)


def test_a_file_says_what_options_say(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "targets: run\nschemes: rtn-4bit\ncheckpoints: ['*-step1000']\ncontext: 128\n"
        "bos: never\npacked: true\nschedule: {kind: linear, peak: 1, end: 9}\n"
        "description: mine\nsources: [me]\n",
    )
    expected = Recipe(
        ("run",), ("rtn-4bit",), checkpoints=("*-step1000",), context=128, bos="never",
        packed=True, schedule={"kind": "linear", "peak": 1, "end": 9},
    )  # fmt: skip
    assert read_recipe(path) == expected
    assert recipe_of(targets=[str(path)]) == expected


def test_an_option_takes_the_place_of_a_key(tmp_path: Path) -> None:
    path = write(tmp_path, "targets: run\ncontext: 128\nsoups: [A+B]\n")
    recipe = recipe_of(targets=[path], context=64, soups=["C+D"])
    assert (recipe.targets, recipe.context, recipe.soups) == (("run",), 64, ("C+D",))


def test_every_field_of_a_recipe_is_a_key() -> None:
    assert {field.name for field in fields(Recipe)} == {"targets", *settings_of(Recipe)}
    assert recipe_of(targets=["a"]) == Recipe(("a",))


@pytest.mark.parametrize(
    ("text", "sentence", "hint"),
    [
        ("contxt: 3", "there is no key `contxt`", "did you mean `context`?"),
        ("calibration-documents: 3", "no key `calibration-documents`", "`calibration_documents`?"),
        ("zzz: 3", "there is no key `zzz`", "one of: targets, schemes"),
        ("context: 1", "`context` is `1`", "greater than or equal to 2"),
        ("context: '3'", "`context` is `3`", "a whole number"),
        ("evaluation_documents: 1", "`evaluation_documents` is `1`", "greater than or equal to 2"),
        ("evaluation_documents: true", "`evaluation_documents` is `True`", "a whole number"),
        ("bos: maybe", "`bos` is `maybe`", "'auto', 'always' or 'never'"),
        ("packed: 3", "`packed` is `3`", "true or false"),
        ("confidence: 95", "`confidence` is `95`", "less than 1"),
        ("device: gpu", "`gpu` is not a device", ""),
        ("dtype: fp32", "`dtype` is `fp32`", "'float32'"),
        ("schemes: 4", "`schemes` is `4`", "a list"),
        ("soups: [{label: a, ofs: [b, c]}]", "there is no key `soups[0].ofs`", "`of`?"),
        ("soups: [{label: a, of: []}]", "`soups[0].of` is `[]`", "a longer list"),
        ("soups: [{of: [b, c]}]", "key `soups[0].label` is missing", "add it"),
        ("schedule: {kind: cosin}", "unknown schedule `cosin`", "for example"),
        ("schedule: {kind: linear, peak: 1}", "needs ['end']", "for example"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_file(
    tmp_path: Path, text: str, sentence: str, hint: str
) -> None:
    path = write(tmp_path, f"targets: [a]\n{text}\n")
    with pytest.raises(RecipeError) as caught:
        recipe_of(targets=[str(path)])
    assert caught.value.message.startswith(f"`{path}`: ")
    assert sentence in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.code == 2


@pytest.mark.parametrize("text", ["", "- a", "[", "targets: [a\n", "just words"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match=r"mine\.yaml"):
        read_recipe(write(tmp_path, text))


def test_a_recipe_that_is_not_there_is_refused_with_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "targets: a")
    with pytest.raises(RecipeError) as caught:
        recipe_of(targets=[str(tmp_path / "mien.yaml")])
    assert caught.value.hint == "did you mean `mine.yaml`?"


def test_a_recipe_stands_by_itself(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are other targets beside it"):
        recipe_of(targets=["demo", "a"])


# ----------------------------------------------------------------------------------------- demo


@pytest.mark.parametrize("path", sorted(recipes_folder().glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_recipe_is_right(path: Path) -> None:
    recipe = read_recipe(path)
    assert parse_schemes(recipe.schemes)
    for soup in recipe.soups:
        parse_merge(parse_soup(soup).merge)


def test_the_demo_measures_everything_by_default() -> None:
    assert recipe_of(targets=["demo"]) == DEMO
    assert DEMO.targets == ("demo",)
    assert DEMO.schemes == DEFAULT_SCHEMES
    assert DEMO.family == "demo"


def test_the_demo_s_soup_is_the_mean_of_its_three_ingredients() -> None:
    (soup,) = resolve_soups(DEMO, SERIES)
    assert (soup.label, soup.merge, soup.kind) == ("soup", "mean", "soup")
    assert [(c.label, weight) for c, weight in soup.members] == [
        (f"stage2-ingredient{k}-step1000", pytest.approx(1 / 3)) for k in (1, 2, 3)
    ]


# ---------------------------------------------------------------------------------------- soups


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A+B", SoupRequest("mean(A+B)", "mean", ("A", "B"))),
        (" A + B ", SoupRequest("mean( A + B )", "mean", ("A", "B"))),
        ("stage2-*", SoupRequest("mean(stage2-*)", "mean", ("stage2-*",))),
        ("mean(A+B)", SoupRequest("mean(A+B)", "mean", ("A", "B"))),
        ("best=mean(A+B)", SoupRequest("best", "mean", ("A", "B"))),
        ("best=A+B", SoupRequest("best", "mean", ("A", "B"))),
        ("best=0.9*A+0.1*B", SoupRequest("best", "weighted", ("A", "B"), (0.9, 0.1))),
        ("best=lr=1+lr=2", SoupRequest("best", "mean", ("lr=1", "lr=2"))),
        ("late=ema:decay=0.9(A+B)", SoupRequest("late", "ema:decay=0.9", ("A", "B"))),
        ("lr=3e-4+lr=1e-3", SoupRequest("mean(lr=3e-4+lr=1e-3)", "mean", ("lr=3e-4", "lr=1e-3"))),
    ],
)
def test_a_soup_is_read(text: str, expected: SoupRequest) -> None:
    assert parse_soup(text) == expected


@pytest.mark.parametrize("text", ["", "A+", "+", "A++B"])
def test_a_soup_with_a_hole_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a soup"):
        parse_soup(text)


def soups(*texts: str, series: tuple[Checkpoint, ...] = SERIES) -> list[tuple[str, list[str]]]:
    recipe = Recipe(("x",), ("rtn-4bit",), soups=texts)
    return [(s.label, [c.label for c, _ in s.members]) for s in resolve_soups(recipe, series)]


def test_a_glob_takes_the_members_in_the_order_of_the_series() -> None:
    expected = [f"stage2-ingredient{k}-step1000" for k in (1, 2, 3)]
    assert soups("ends=mean(stage2-ingredient*-step1000)") == [("ends", expected)]


def test_a_folder_whose_name_looks_like_a_glob_is_taken_by_its_name() -> None:
    series = (checkpoint("run[1]"), checkpoint("run[2]"))
    assert soups("run[1]+run[2]", series=series)[0][1] == ["run[1]", "run[2]"]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("stage3-*", "no checkpoint matches `stage3-*`", "there are: stage1-step500, "),
        ("stage1-step500+stage1-step50", "no checkpoint `stage1-step50`", "`stage1-step500`?"),
        ("stage1-*", "`mean(stage1-*)` has one member, `stage1-step500`", "two or more"),
        ("stage1-step500+stage1-step500", "the same weights twice", "leave one of them out"),
        ("stage2-*+stage2-ingredient2-step1000", "the same weights twice", "leave one"),
        ("a=maen(stage2-*)", "no merge `maen`", "`mean`?"),
        ("stage1-step500=mean(stage2-*)", "two subjects are called `stage1-step500`", "label="),
    ],
)
def test_a_soup_that_cannot_be_made_is_refused(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        soups(text)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_members_of_equal_weights_are_refused_whatever_they_are_called() -> None:
    twins = (checkpoint("a", "same"), checkpoint("b", "same"), checkpoint("c"))
    with pytest.raises(UsageError, match="the same weights twice: `a` and `b`"):
        soups("a+b+c", series=twins)


def test_two_soups_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two subjects are called"):
        soups("stage2-*", "stage2-*")


# ------------------------------------------------------------------------------------ selection


def labels(found: tuple[Checkpoint, ...]) -> list[str]:
    return [c.label for c in found]


def test_without_a_glob_everything_is_selected() -> None:
    assert select(Recipe(("x",), ()), SERIES) == SERIES


def test_globs_select_in_the_order_of_the_series() -> None:
    recipe = Recipe(("x",), (), checkpoints=("*ingredient2*", "stage1-step500"))
    assert labels(select(recipe, SERIES)) == ["stage1-step500", "stage2-ingredient2-step1000"]


def test_a_glob_that_selects_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="no checkpoint matches `x\\*`"):
        select(Recipe(("x",), (), checkpoints=("x*",)), SERIES)


def test_members_of_a_soup_are_needed_although_not_selected() -> None:
    recipe = Recipe(
        ("x",), (), checkpoints=("stage1-*",), soups=("stage2-ingredient[12]-step1000",)
    )
    assert labels(needed(recipe, SERIES)) == [
        "stage1-step500",
        "stage2-ingredient1-step1000",
        "stage2-ingredient2-step1000",
    ]
