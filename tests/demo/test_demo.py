"""The series that ships: what it is, and that it never saw what it is evaluated on."""

import json

import pytest

from experiments.demo import INGREDIENTS, STAGE1, split
from qaudit.checkpoints.folder import find_all, shipped_series
from qaudit.core.schedules import Linear
from qaudit.planning.prepare import make_plan
from qaudit.recipe.table import recipe_of
from qaudit.text.documents import part_of, python_documents

FOLDER = shipped_series()


@pytest.fixture(scope="module")
def heldout():
    lines = (FOLDER / "heldout.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("  ", 1) for line in lines if not line.startswith("#")]
    return {name: sha256 for sha256, name in pairs}


def test_no_held_out_document_is_trained_on(heldout):
    training, evaluation = split()
    assert heldout
    assert not {d.sha256 for d in training} & set(heldout.values())
    assert not {d.name for d in training} & set(heldout)
    assert {d.name for d in evaluation}.isdisjoint({d.name for d in training})


def test_what_the_demo_is_evaluated_on_is_held_out_in_every_python(heldout):
    assert {part_of(name) for name in heldout} == {"evaluation"}
    evaluated = list(python_documents(part="evaluation"))
    assert evaluated
    for document in evaluated:  # another Python has other texts, under names held out all the same
        assert part_of(document.name) == "evaluation"


@pytest.fixture(scope="module")
def found():
    return find_all(["demo"], recipe_of(targets=["demo"]))


def test_the_series_is_a_held_rate_then_three_decays_as_the_trainer_ran_them(found):
    assert len(found) >= 10
    held = [c for c in found if c.stage == "stage1"]
    assert [c.step for c in held] == list(STAGE1.save_at)
    assert {c.learning_rate for c in held} == {STAGE1.schedule.peak}
    ends = [c for c in found if c.ingredient and c.step == INGREDIENTS[0].steps]
    assert [c.ingredient for c in ends] == [1, 2, 3]
    assert [c.learning_rate for c in ends] == [0.0] * 3
    assert len({c.content for c in found}) == len(found)
    named = {c.label: c for c in found}
    for run in INGREDIENTS:
        assert isinstance(run.schedule, Linear)
        for step in run.save_at:
            assert named[run.label(step)].learning_rate == pytest.approx(run.schedule.at(step))
    tokens = STAGE1.batch * STAGE1.shape.context
    assert named["stage1-step500"].tokens == 500 * tokens
    assert named[INGREDIENTS[0].label(250)].tokens == (STAGE1.steps + 250) * tokens


def test_the_log_of_the_training_is_there_and_it_fits_the_wheel():
    lines = (FOLDER / "training.jsonl").read_text(encoding="utf-8").splitlines()
    last = {line["run"]: line["step"] for line in map(json.loads, lines)}
    assert last == {run.name: run.steps for run in (STAGE1, *INGREDIENTS)}
    assert sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file()) < 40e6


def test_the_recipe_merges_the_three_ingredients():
    plan = make_plan(recipe_of(targets=["demo"]))
    (soup,) = [s for s in plan.subjects if s.kind == "soup"]
    assert [c.ingredient for c, _ in soup.members] == [1, 2, 3]
    assert sum(share for _, share in soup.members) == pytest.approx(1)
