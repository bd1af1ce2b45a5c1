"""A run as a value: its key, its table, and the values it refuses."""

import json
from dataclasses import fields, replace

import pytest
from pydantic import ValidationError

from experiments.run import TrainingRun, differences
from qaudit.core.schedules import Constant, build
from tests.support.training import DECAY, HELD, SHAPE

CHANGES = {
    "shape": replace(SHAPE, layers=2),
    "schedule": Constant(peak=2e-2, warmup=2),
    "batch": 8,
    "seed": 2,
    "order": 9,
    "accumulation": 2,
    "weight_decay": 0.0,
    "betas": (0.8, 0.95),
    "clip": 2.0,
    "sam_rho": 0.05,
    "ema_decay": 0.9,
    "lawa": (2, 10),
    "precision": "fp32",
    "attention": "eager",
}
FREE = {"name": "other", "steps": 30, "save_at": (20,), "keep_at": (10,)}
FORK = {"parent", "fork_at"}


def test_every_field_either_changes_the_key_or_is_known_not_to():
    assert {f.name for f in fields(TrainingRun)} == set(CHANGES) | set(FREE) | FORK


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_weights_changes_the_key(name):
    changed = replace(HELD, **{name: CHANGES[name]})
    assert changed.key != HELD.key
    assert any(f"`{name}" in line for line in differences(HELD, changed))


@pytest.mark.parametrize("name", FREE)
def test_what_changes_no_weight_leaves_the_key(name):
    changed = replace(HELD, **{name: FREE[name]})
    assert changed.key == HELD.key
    assert differences(HELD, changed) == []


def test_a_fork_is_what_it_forks_from_to_the_very_beginning():
    assert replace(DECAY, fork_at=10).key != DECAY.key
    grandparent = replace(HELD, weight_decay=0.3)
    assert replace(DECAY, parent=grandparent).key != DECAY.key
    further = replace(DECAY, name="x", parent=DECAY, fork_at=10)
    changed = replace(further, parent=replace(DECAY, parent=grandparent))
    assert changed.key != further.key
    assert differences(further, changed)[0].startswith("`parent` was stage2-ingredient1")


def test_the_first_weights_of_a_fork_are_its_parents_whatever_its_seed():
    assert replace(DECAY, seed=8, order=3).key == replace(DECAY, seed=9, order=3).key
    assert replace(HELD, order=HELD.seed).key == HELD.key


@pytest.mark.parametrize("run", [HELD, DECAY, replace(HELD, lawa=(2, 10), keep_at=(5,))])
def test_a_run_is_read_back_from_its_table(run):
    assert TrainingRun(**json.loads(json.dumps(run.table()))) == run


@pytest.mark.parametrize(
    ("changed", "field", "words"),
    [
        ({"name": "../up"}, "name", "should match pattern"),
        ({"steps": 0, "batch": 0}, "batch", "greater than or equal to 1"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"accumulation": 3}, "", "`accumulation` is 3 and must divide the batch of 4"),
        ({"save_at": (21,)}, "", "`save_at` has 21, and the run has 20 steps"),
        ({"keep_at": (0,)}, "keep_at", "greater than or equal to 1"),
        ({"schedule": build("constant", peak=0.0)}, "", "`peak` is 0 and must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay", "greater than or equal to 0"),
        ({"betas": (0.9, 1.0)}, "betas", "less than 1"),
        ({"clip": 0.0}, "clip", "greater than 0"),
        ({"sam_rho": -0.1}, "sam_rho", "greater than or equal to 0"),
        ({"ema_decay": 1.0}, "ema_decay", "less than 1"),
        ({"lawa": (1, 5)}, "lawa", "greater than or equal to 2"),
        ({"lawa": (3, 10)}, "", "no saved step is a multiple of 10 from 30 on"),
        ({"precision": "fp8"}, "precision", "'bf16' or 'fp32'"),
        ({"attention": "magic"}, "attention", "'sdpa' or 'eager'"),
        ({"fork_at": 5}, "", "`fork_at` is 5 and must be 0 without a parent"),
        ({"parent": HELD}, "", "`name` is `stage1` and must differ from its parent's"),
    ],
)
def test_a_run_with_a_wrong_value_is_refused_with_what_is_allowed(changed, field, words):
    with pytest.raises(ValidationError) as refusal:
        replace(HELD, **changed)
    errors = {str(e["loc"][0]) if e["loc"] else "": e["msg"] for e in refusal.value.errors()}
    assert words in errors[field]


def test_every_contradiction_is_named_at_once():
    with pytest.raises(ValidationError, match=r"`accumulation` is 3 .*, and `save_at` has 21"):
        replace(HELD, accumulation=3, save_at=(21,))
