"""Family files: every one that ships is read; a wrong key is named with the right one."""

import re
import time

import pytest
from pydantic import BaseModel

from qaudit.errors import RecipeError
from qaudit.families import Family, all_families, families_in, learning_rate_of, load, load_file
from qaudit.families.family import Inferred
from tests.house.source import ROOT

DEMO = load("demo")


def read(tmp_path, text):
    path = tmp_path / "family.yaml"
    path.write_text(text, encoding="utf-8")
    return load_file(path)


def refusal(tmp_path, text):
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, text)
    assert "family.yaml" in caught.value.message
    return caught.value


def rate(family, name):
    return family.learning_rate(family.place(name))


def tokens(family, name):
    return family.tokens(family.place(name))


def test_shipped_families_name_their_sources_and_reasons():
    names = [family.family for family in all_families()]
    assert len(set(names)) == len(names)
    assert sum(not table.verified for table in inferred(load("olmo-7b"))) == 3
    for family in all_families():
        assert family.description.endswith("."), family.family
        assert family.sources and family.match.model_type, family.family
        assert family.match.repos or family.family == "demo"
        assert set(family.why_required) <= set(family.requires), family.family
        for table in inferred(family):
            assert table.verified or table.reason, family.family


def inferred(value):
    """Return every table inside a family that may be inferred."""
    if isinstance(value, tuple):
        return [found for item in value for found in inferred(item)]
    if not isinstance(value, BaseModel):
        return []
    inside = [
        found for name in type(value).model_fields for found in inferred(getattr(value, name))
    ]
    return [value, *inside] if isinstance(value, Inferred) else inside


def test_the_demo_s_learning_rate_is_that_of_its_trainer():
    from experiments.demo import BATCH, DECAY, HELD, INGREDIENTS, SHAPE, STAGE1

    for run, before in ((STAGE1, 0), *((run, HELD) for run in INGREDIENTS)):
        for step in run.save_at:
            name = run.label(step)
            assert rate(DEMO, name) == pytest.approx(run.schedule.at(step), abs=1e-12)
            assert tokens(DEMO, name) == (before + step) * BATCH * SHAPE.context
    assert (DEMO.stages[0].end_step, DEMO.stages[1].end_step) == (HELD, DECAY)


def test_what_is_inferred_of_a_place_is_noted_and_the_unknown_is_read_by_general_rules():
    for name, revision, expected in (
        ("olmo2-7b", "stage1-step928000-tokens3893B", ()),
        ("smollm3", "main", ("the place of `main` in the run is inferred: the base",)),
        ("crystal", "CrystalCoder_phase3_checkpoint_027728",
         ("the learning rate of `phase3` is inferred: the decay",)),
        ("olmo-7b", "step10000-tokens44B",
         ("the learning rate of `pretraining` is inferred: approximate",
          "the tokens of a step of `pretraining` are inferred: 2160 windows")),
    ):  # fmt: skip
        family, repo = load(name), "HuggingFaceTB/SmolLM3-3B-Base" if revision == "main" else None
        notes = family.notes(family.place(revision, repo), repo)
        for note, start in zip(notes, expected, strict=True):
            assert note.startswith(start)
    # What the label says of tokens is only kept.
    assert load("olmo2-7b").place("stage1-step928000-tokens3893B").tokens == 3893 * 10**9
    place = DEMO.place("extra-step5")
    assert (place.stage, place.step) == ("extra", 5)
    assert (DEMO.tokens(place), DEMO.learning_rate(place)) == (None, None)


def test_a_schedule_that_changed_in_the_middle_has_pieces(tmp_path):
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
  - name: stage2
    lr:
      - {kind: constant, peak: 1.0, ingredients: [1, 2]}
      - {kind: constant, peak: 2.0, ingredients: [3]}
""",
    )
    assert [rate(pieces, f"stage1-step{n}") for n in (10, 11, 20, 21)] == [1.0, 2.0, 2.0, None]
    assert [rate(pieces, f"stage2-ingredient{n}-step5") for n in (1, 2, 3, 4)] == [1, 1, 2, None]


SIZES = """
description: Sizes.
match: {model_type: llama}
sources: [a]
stages:
  - {name: early, pattern: 'early-(?P<step>[0-9]+)'}
  - name: pretraining
    lr: {kind: linear, end: 10}
variants:
  - family: small
    match: {repos: [a/small]}
    stages: [{name: pretraining, lr: {peak: 2.0}}, {name: late}]
    sources: [b]
  - family: large
    match: {repos: [a/large], reads: ['-peak(?P<peak>[0-9]+)']}
    stages: [{name: pretraining, lr: {peak: 1.0, end: 20}}]
    tokens_per_step: {tokens: 7, verified: false, reason: fitted}
"""


def test_sizes_of_one_run_share_a_file(tmp_path):
    path = tmp_path / "family.yaml"
    path.write_text(SIZES, encoding="utf-8")
    small, large = families_in(path)
    assert (small.family, large.family) == ("small", "large")
    assert small.match.model_dump() == {"repos": ("a/small",), "model_type": "llama", "reads": ()}
    assert (small.sources, large.sources) == (("a", "b"), ("a",))
    assert [stage.name for stage in small.stages] == ["early", "pretraining", "late"]
    assert [stage.name for stage in large.stages] == ["early", "pretraining"]
    assert [rate(f, "pretraining-step5") for f in (small, large)] == [1.0, 0.75]
    note = "the tokens of a step of `pretraining` are inferred: fitted"
    assert large.notes(large.place("pretraining-step5")) == (note,)


WRONG = [
    ("stagse: []", "there is no key `stagse`", "did you mean `stages`?"),
    ("stages: [{nmae: a}]", "there is no key `stages[0].nmae`", "did you mean `name`?"),
    ("match: {repo: [a]}", "there is no key `match.repo`", "did you mean `repos`?"),
    ("soups: [{label: a}]", "key `soups[0].of` is missing", "add it"),
    ("requires: [pickel]", "`requires[0]` is `pickel`", "it must be 'pickle', 'remote_code'"),
    ("known_duplicates: [{revisions: [a], reson: b}]", "no key", "did you mean `reason`?"),
    ("stages: [{name: a, lr: {kind: constant, peak: x}}]", "which is no number", ""),
    ("match: {reads: ['(']}", "not a regular expression", ""),
    ("context: many", "`context` is `many`", "it must be a whole number"),
    ("stages: [{name: a, lr: {kind: cosin, peak: 1}}]", "unknown schedule `cosin`", ""),
    ("stages: [{name: a, lr: {kind: cosine, peak: 1}}]", "needs ['end']", ""),
    ("stages: [{name: a, pattern: '" + "a?" * 40 + "'}]", "could take hours", "write it"),
    ("stages: [{name: a, pattern: '" + "(a|aa)" * 40 + "'}]", "could take hours", "write it"),
    ("stages: [{name: a, pattern: '(a+)+b'}]", "could take hours", "write it without"),
    ("stages: [{name: a, pattern: '(x)?(?(1)y|(a+)+b)'}]", "could take hours", "write it"),
    ("stages: [{name: a, pattern: '(a|aa)*b'}]", "repeats what already repeats", ""),
    ("stages: [{name: a, pattern: '(?:a?){30}a{30}'}]", "repeats what already repeats", ""),
    ("stages: [{name: a, pattern: 'a.*a.*a.*b'}]", "3 of its repeats match more", ""),
    ("stages: [{name: a, pattern: '" + r"\d*" * 9 + "'}]", "it has 9 repeats", ""),
    ("stages: [{name: a, pattern: '" + "a" * 501 + "'}]", "longer than 500", "shorten it"),
    ("stages: [{name: a, pattern: '('}]", "not a regular expression", ""),
    ("stages: [{name: a, pattern: '(?P<n>x)'}]", "names groups ['n']", ""),
    ("stages: [{name: a, starts_after: b}]", "such as `stage1@5000`", ""),
    ("stages: [{name: a, starts_after: b@3}]", "is not before it", ""),
    ("stages: [{name: a, lr: {kind: constant, peak: 1, units: samples}}]", "tokens_per_sample", ""),
    # variants
    ("variants: [{family: a, stagse: []}]", "`a`: there is no key `stagse`", "did you mean"),
    ("variants: [{stages: []}]", "`variants[0]`: key `family` is missing", "add it"),
    ("variants: [{family: a, stages: [{nmae: b}]}]", "no key `stages[0].nmae`", "did you"),
    ("variants: {family: a}", "`variants` must be a list of tables", "see the others"),
    ("variants: [3]", "`variants` must be a list of tables", "see the others"),
    ("variants: []", "holds 0 families", ""),
    ("variants: [{family: a}, {family: b}]", "holds 2 families", ""),
]


def test_a_wrong_family_file_is_explained(tmp_path):
    for text, sentence, hint in WRONG:
        name = "" if text.startswith("variants") else "family: x\n"
        error = refusal(tmp_path, f"{name}description: y\n{text}\n")
        assert sentence in error.message
        assert error.hint.startswith(hint)
    for text in ("[", "- 3", "", "\t\tx: 1"):
        refusal(tmp_path, text)


def test_a_recipe_s_schedule_is_held_to_the_same_keys():
    schedule = learning_rate_of({"kind": "linear", "peak": 1.0, "end": 10})
    assert schedule.schedule().at(5) == 0.5
    with pytest.raises(RecipeError):
        learning_rate_of({"kind": "linear", "peak": 1.0})


def test_a_pattern_that_is_accepted_fails_fast_on_long_names():
    began = time.process_time()
    for pattern in (r".*.*b", r"\d*" * 8 + "x", r"(?P<step>\d+)(?:-\d+)?.*x"):
        stages = [{"name": "s", "pattern": pattern}]
        family = Family.model_validate({"family": "f", "description": "d", "stages": stages})
        for name in ("a" * 255, "1" * 18 + "a" * 237, "a" * 100_000):
            family.place(name)
    assert time.process_time() - began < 2


# --------------------------------------------------------------------------------------------------
# The family in CONTRIBUTING.md works, and a slip in it is named.


def example():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    (block,) = (block for block in blocks if "family:" in block)
    return block


def test_the_family_of_the_guide_works_and_a_slip_in_it_is_named(tmp_path):
    acorn = read(tmp_path, example())
    place = acorn.place("step90000")
    assert acorn.learning_rate(place) == pytest.approx(2.5e-4)
    assert acorn.tokens(place) == 90_000 * 2_097_152
    assert acorn.notes(place) == ()
    fitted = example().replace("decay_length: 20000", "decay_length: 20000, verified: false")
    (note,) = read(tmp_path, fitted).notes(acorn.place("step5"))
    assert note == "the learning rate of `pretraining` is inferred"
    error = refusal(tmp_path, example().replace("decay_start", "decay_begin"))
    said = f"{error.message}; {error.hint}"
    assert "schedule `wsd` has no ['decay_begin']" in said
    assert "'decay_start'" in said
