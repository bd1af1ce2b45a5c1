"""The family in CONTRIBUTING.md works, and a slip in it is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qaudit.errors import RecipeError
from qaudit.families import Family, load_file
from qaudit.families.family import LearningRate, Stage
from tests.house.source import ROOT


def example() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    (block,) = (block for block in blocks if "family:" in block)
    return block


def contribute(folder: Path, text: str) -> Family:
    path = folder / "acorn-1b.yaml"
    path.write_text(text, encoding="utf-8")
    return load_file(path)


def test_the_family_of_the_guide_works(tmp_path: Path) -> None:
    acorn = contribute(tmp_path, example())
    place = acorn.place("step90000")
    assert acorn.learning_rate(place) == pytest.approx(2.5e-4)
    assert acorn.tokens(place) == 90_000 * 2_097_152
    assert acorn.notes(place) == ()


FAMILY_KEYS = [key for key in Family.model_fields if f"{key}:" in example()]
STAGE_KEYS = [key for key in Stage.model_fields if re.search(rf"^ +(- )?{key}:", example(), re.M)]


def misspelt(key: str) -> str:
    """Leave out a letter, as fingers do."""
    return key[0] + key[2:]


@pytest.mark.parametrize("key", [key for key in FAMILY_KEYS + STAGE_KEYS if len(key) > 2])
def test_a_misspelt_key_is_told_the_nearest(tmp_path: Path, key: str) -> None:
    assert misspelt(key) != key
    text = re.sub(rf"^( *(?:- )?){key}:", rf"\1{misspelt(key)}:", example(), count=1, flags=re.M)
    with pytest.raises(RecipeError) as caught:
        contribute(tmp_path, text)
    assert misspelt(key) in caught.value.message
    assert caught.value.hint == f"did you mean `{key}`?"


def test_a_misspelt_parameter_of_a_schedule_is_told_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        contribute(tmp_path, example().replace("decay_start", "decay_begin"))
    said = f"{caught.value.message}; {caught.value.hint}"
    assert "schedule `wsd` has no ['decay_begin']" in said
    assert "'decay_start'" in said


def test_an_inferred_schedule_is_noted_with_its_reason(tmp_path: Path) -> None:
    assert {"verified", "reason"} <= set(LearningRate.model_fields)
    text = example().replace(
        "decay_length: 20000", "decay_length: 20000, verified: false, reason: r"
    )
    acorn = contribute(tmp_path, text)
    assert acorn.notes(acorn.place("step5")) == (
        "the learning rate of `pretraining` is inferred: r",
    )
