"""Family files: every one that ships is read; a wrong key is named with the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from qaudit.errors import RecipeError, UsageError
from qaudit.families import Family, all_families, find, learning_rate_of, load, load_file

DEMO = load("demo")

OLMO2_7B = """
family: olmo2-7b
description: OLMo 2 7B.
match: {repos: [allenai/OLMo-2-1124-7B*], model_type: olmo2}
dtype: float32
bytes_per_checkpoint: 29194510544
shards: 6
tokens_per_step: 4194304
stages:
  - name: stage1
    pattern: 'stage1-step(?P<step>\\d+)-tokens(?P<tokens>\\d+)(?P<unit>B)'
    lr: {kind: cosine, units: tokens, peak: 3.0e-4, warmup: 8388608000, end: 5e12}
    end_step: 928646
  - name: stage2
    pattern: 'stage2-ingredient(?P<ingredient>\\d+)-step(?P<step>\\d+)-tokens(?P<tokens>\\d+)B'
    starts_after: stage1@928646
    lr: {kind: linear, units: tokens, peak: 6.1499e-5, end: 50.0e9, verified: false}
named:
  - {name: main, stage: stage2, step: 11931, verified: false}
soups:
  - label: main
    target: main
    of: [a, b, c]
    verified: false
known_duplicates: [[stage1-step98000, stage1-step101000]]
known_bad: [{revisions: [stage1-step175000], reason: same weights as another}]
sources: [a paper]
unverified: [named]
"""


def read(tmp_path: Path, text: str) -> Family:
    path = tmp_path / "family.yaml"
    path.write_text(text, encoding="utf-8")
    return load_file(path)


def refusal(tmp_path: Path, text: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, text)
    assert "family.yaml" in caught.value.message
    return caught.value


def rate(family: Family, name: str) -> float | None:
    return family.learning_rate(family.place(name))


def tokens(family: Family, name: str) -> int | None:
    return family.tokens(family.place(name))


def test_every_shipped_family_reads_its_own_soups() -> None:
    assert [family.family for family in all_families()]
    for family in all_families():
        assert family.description.endswith(".")
        for soup in family.soups:
            assert all(not family.place(member).named for member in soup.of)


def test_the_demo_s_learning_rate_is_that_of_its_trainer() -> None:
    from qaudit.lab.demo import BATCH, DECAY, HELD, INGREDIENTS, SHAPE, STAGE1

    for run, before in ((STAGE1, 0), *((run, HELD) for run in INGREDIENTS)):
        for step in run.save_at:
            name = run.label(step)
            assert rate(DEMO, name) == pytest.approx(run.schedule.at(step), abs=1e-12)
            assert tokens(DEMO, name) == (before + step) * BATCH * SHAPE.context
    assert (DEMO.stages[0].end_step, DEMO.stages[1].end_step) == (HELD, DECAY)


def test_a_published_stage_gives_tokens_and_learning_rate(tmp_path: Path) -> None:
    olmo = read(tmp_path, OLMO2_7B)
    name = "stage1-step928000-tokens3893B"
    assert rate(olmo, name) == pytest.approx(6.149879e-05, rel=1e-6)
    assert tokens(olmo, name) == 928_000 * 4_194_304
    assert olmo.place(name).tokens == 3893 * 10**9  # what the label says is only kept


def test_a_later_stage_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    olmo = read(tmp_path, OLMO2_7B)
    name = "stage2-ingredient3-step6000-tokens26B"
    assert rate(olmo, name) == pytest.approx(3.054554e-05, rel=1e-6)
    assert tokens(olmo, name) == (928_646 + 6000) * 4_194_304
    assert olmo.notes(olmo.place(name)) == ("the learning rate of `stage2` is inferred",)


def test_a_named_checkpoint_stands_where_its_family_says(tmp_path: Path) -> None:
    olmo = read(tmp_path, OLMO2_7B)
    place = olmo.place("main")
    assert (place.stage, place.step) == ("stage2", 11_931)
    assert "where `main` stands in the run is inferred" in olmo.notes(place)


def test_what_a_family_does_not_know_is_read_by_the_general_rules() -> None:
    place = DEMO.place("extra-step5")
    assert (place.stage, place.step) == ("extra", 5)
    assert DEMO.tokens(place) is None
    assert DEMO.learning_rate(place) is None


def test_batches_that_grow_are_counted_where_they_grow(tmp_path: Path) -> None:
    apertus = read(
        tmp_path,
        """
family: apertus-8b
description: Apertus 8B.
stages:
  - name: pretraining
    tokens_per_sample: 4096
    tokens_per_step: [{tokens: 4194304}, {from_step: 1678000, tokens: 8388608}]
    lr: {kind: wsd, units: samples, peak: 1.1e-4, warmup: 4096000, floor: 1.1e-5, shape: sqrt,
         decay_start: 3258203569, decay_length: 403905806}
""",
    )
    assert tokens(apertus, "step1000") == 1000 * 4_194_304
    assert tokens(apertus, "step1700000-tokens7232B") == 1_678_000 * 4_194_304 + 22_000 * 8_388_608
    assert rate(apertus, "step2500000") == pytest.approx(5.098559e-5, rel=1e-6)


def test_a_counted_checkpoint_becomes_a_step(tmp_path: Path) -> None:
    amber = read(
        tmp_path,
        """
family: amber
description: Amber.
tokens_per_step: 4587520
stages:
  - name: pretraining
    pattern: 'ckpt_(?P<index>\\d+)'
    index: {steps: 762, offset: 1}
    lr: {kind: cosine, peak: 3.0e-4, warmup: 2000, end: 274320}
""",
    )
    assert amber.place("ckpt_100").step == 762 * 101
    assert rate(amber, "ckpt_100") == pytest.approx(2.525878e-4, rel=1e-6)


def test_a_schedule_that_changed_in_the_middle_has_pieces(tmp_path: Path) -> None:
    pieces = read(
        tmp_path,
        """
family: olmo3-7b
description: Olmo 3 7B.
stages:
  - name: stage1
    lr:
      - {kind: constant, peak: 1.0, until_step: 10}
      - {kind: constant, peak: 2.0, until_step: 20}
""",
    )
    assert [rate(pieces, f"stage1-step{n}") for n in (10, 11, 20, 21)] == [1.0, 2.0, 2.0, None]


def test_a_family_is_found_by_its_repository_only(tmp_path: Path) -> None:
    assert find("somebody/else") is None
    assert not any(glob == "*" for family in all_families() for glob in family.match.repos)


@pytest.mark.parametrize(
    ("text", "sentence", "hint"),
    [
        ("stagse: []", "there is no key `stagse`", "did you mean `stages`?"),
        ("stages: [{nmae: a}]", "there is no key `stages[0].nmae`", "did you mean `name`?"),
        ("match: {repo: [a]}", "there is no key `match.repo`", "did you mean `repos`?"),
        ("soups: [{label: a}]", "key `soups[0].of` is missing", "add it"),
        ("shards: many", "`shards` is `many`", "it must be a whole number"),
        ("stages: [{name: a, lr: {kind: cosin, peak: 1}}]", "unknown schedule `cosin`", ""),
        ("stages: [{name: a, lr: {kind: cosine, peak: 1}}]", "does not say its ['end']", ""),
        ("stages: [{name: a, pattern: '('}]", "not a regular expression", ""),
        ("stages: [{name: a, pattern: '(?P<n>x)'}]", "names groups ['n']", ""),
        ("stages: [{name: a, starts_after: b}]", "such as `stage1@5000`", ""),
        ("stages: [{name: a, starts_after: b@3}]", "does not stand before it", ""),
        (
            "stages: [{name: a, lr: {kind: constant, peak: 1, units: samples}}]",
            "needs `tokens_per_sample`",
            "",
        ),
    ],
)
def test_a_wrong_family_file_is_explained(
    tmp_path: Path, text: str, sentence: str, hint: str
) -> None:
    error = refusal(tmp_path, f"family: x\ndescription: y\n{text}\n")
    assert sentence in error.message
    assert error.hint == hint


@pytest.mark.parametrize("text", ["[", "- 3", "", "\t\tx: 1"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    refusal(tmp_path, text)


def test_an_unknown_family_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        load("dmeo")
    assert caught.value.hint == "did you mean `demo`?"


def test_a_recipe_s_schedule_is_held_to_the_same_keys() -> None:
    schedule = learning_rate_of({"kind": "linear", "peak": 1.0, "end": 10})
    assert schedule.schedule().at(5) == 0.5
    with pytest.raises(RecipeError):
        learning_rate_of({"kind": "linear", "peak": 1.0})
