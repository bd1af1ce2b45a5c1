"""Recipes and keyword arguments: every key checked, and every wrong one named."""

from dataclasses import fields
from pathlib import Path

import pytest

from qaudit.errors import RecipeError, UsageError
from qaudit.recipe.table import (
    parse_nbytes,
    read_recipe,
    recipe_and_options,
    recipe_of,
    recipes_folder,
    set_values,
    take,
)  # fmt: skip
from qaudit.settings import (
    DEFAULT_SCHEMES,
    GROUPS,
    PRESETS,
    Execution,
    Presets,
    Recipe,
    RunOptions,
    settings_of,
)  # fmt: skip


def write(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# ----------------------------------------------------------------------------------------- keys


def test_a_recipe_is_of_options_of_a_file_or_of_both(tmp_path):
    recipe = recipe_of(targets=["a", "b"], schemes=["rtn-4bit,gptq-3bit"], context=None)
    assert recipe == Recipe(("a", "b"), ("rtn-4bit,gptq-3bit",))
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
    path = write(tmp_path, "targets: run\ncontext: 128\nsoups: [A+B]\n")
    recipe = recipe_of(targets=[path], context=64, soups=["C+D"])
    assert (recipe.targets, recipe.context, recipe.soups) == (("run",), 64, ("C+D",))


WRONG_KEYS = [
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
    ("schemes: 4", "`schemes[0]` is `4`", "a text"),
    ("soups: [{label: a, ofs: [b, c]}]", "there is no key `soups[0].ofs`", "`of`?"),
    ("soups: [{label: a, of: []}]", "`soups[0].of` is `[]`", "a longer list"),
    ("soups: [{of: [b, c]}]", "key `soups[0].label` is missing", "add it"),
    ("schedule: {kind: cosin}", "unknown schedule `cosin`", "for example"),
    ("schedule: {kind: linear, peak: 1}", "needs ['end']", "for example"),
]
WRONG_ARGUMENTS = [
    ({"contxt": 3}, "there is no setting `contxt`", "did you mean `context`?"),
    ({"disk": "9GB"}, "there is no setting `disk`", "schemes"),
    ({"context": "3"}, "`context` is `3`", "a whole number"),
    ({"update": 1}, "`update` is `1`", "true or false"),
    ({"disk_budget": "60"}, "`60` has no unit", "write `60GB` or `60MB`"),
    ({"disk_budget": 60}, "`60` has no unit", "write `60GB` or `60MB`"),
    ({"stream_memory": "lots"}, "`lots` is not a size", "512MB"),
    ({"stream_memory": "9" * 400}, "more than any machine has", "512MB"),
]
WRONG_TEXTS = [
    ("contxt=3", "there is no setting `contxt`", "did you mean `context`?"),
    ("threads=3", "`qaudit scan` takes no `threads`", "context"),
    ("context", "`--set context` has no value", "`--set context=VALUE`"),
    ("context=long", "`context` is `long`", "a whole number from 2"),
    ("packed=2", "`packed` is `2`", "true or false"),
    ("confidence=high", "`confidence` is `high`", "a number"),
    ("schedule=[", "`schedule` is `[`", "a table"),
]


@pytest.mark.parametrize(("wrong", "sentence", "hint"), WRONG_KEYS + WRONG_ARGUMENTS + WRONG_TEXTS)
def test_a_wrong_key_argument_or_text_is_named(tmp_path, wrong, sentence, hint):
    in_file = (wrong, sentence, hint) in WRONG_KEYS
    path = write(tmp_path, f"targets: [a]\n{wrong}\n")
    kind = RecipeError if in_file or wrong == {"context": "3"} else UsageError
    with pytest.raises(kind) as caught:
        if isinstance(wrong, dict):
            recipe_and_options("a", **wrong)
        elif in_file:
            recipe_of(targets=[str(path)])
        else:
            set_values(wrong.split(), [*settings_of(Recipe)], "scan")
    assert caught.value.message.startswith(f"`{path}`: " if in_file else "")
    assert sentence in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.code == 2


def test_settings_are_what_to_measure_and_how_in_presets_and_texts(tmp_path):
    for text in ("", "- a", "[", "targets: [a\n", "just words"):
        with pytest.raises(RecipeError, match=r"mine\.yaml"):
            read_recipe(write(tmp_path, text))
    with pytest.raises(RecipeError) as caught:
        recipe_of(targets=[str(tmp_path / "mien.yaml")])
    assert caught.value.hint == f"did you mean `{tmp_path / 'mine.yaml'}`?"
    with pytest.raises(UsageError, match="there are other targets beside it"):
        recipe_of(targets=["demo", "a"])
    demo = read_recipe(recipes_folder() / "demo.yaml")
    assert recipe_of(targets=["demo"]) == demo
    assert (demo.targets, demo.schemes, demo.family) == (("demo",), DEFAULT_SCHEMES, "demo")
    recipe, options = recipe_and_options(
        "a", Path("b"), calibration_documents=32, stream_memory="1.5GiB", out="here", last=None
    )
    assert recipe == Recipe(("a", "b"), calibration_documents=32)
    assert options == RunOptions(stream_memory=parse_nbytes("1.5GiB"), out=Path("here"))
    assert recipe_and_options("a") == (Recipe(("a",)), RunOptions())
    sizes = [parse_nbytes(text) for text in ("1B", "512MB", "1.5 GiB", "2k")]
    assert sizes == [1, 512e6, 1.5 * 2**30, 2000]
    recipe, _ = recipe_and_options("a", quick=True, calibration_documents=48)
    assert recipe == Recipe(("a",), **{**PRESETS["quick"], "calibration_documents": 48})
    assert (recipe.dtype, recipe.document_tokens, recipe.repeats) == ("fast", 512, 1)
    for group in GROUPS:
        assert {*settings_of(group)} == {f.name for f in fields(group)} - {"targets"}
    assert len(settings_of()) == sum(len(settings_of(group)) for group in GROUPS)
    for entry in settings_of().values():
        assert entry.help.endswith(".")
        assert entry.shown_default not in ("", "None", "()")
    assert PRESETS.keys() == settings_of(Presets).keys()
    assert all(keys.keys() <= settings_of(Recipe).keys() for keys in PRESETS.values())
    texts = ["context=8", "context=64", "packed=true", "confidence=0.9", "slurm=a", "slurm=b"]
    texts += ["strata=a=b", "schedule={kind: linear, peak: 0.003, end: 1000}"]
    values = set_values(texts, [*settings_of()], "scan")
    assert values == {
        "context": 64, "packed": True, "confidence": 0.9, "slurm": ["a", "b"], "strata": "a=b",
        "schedule": {"kind": "linear", "peak": 0.003, "end": 1000},
    }  # fmt: skip
    assert take(Execution, values).slurm == ("a", "b")
    assert recipe_and_options("a", **values)[0].packed
