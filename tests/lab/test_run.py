"""A run as a value: its key, its table, and what it cannot be."""

import json
from dataclasses import fields, replace

import pytest

from qaudit.core.schedules import Constant, build
from qaudit.errors import UsageError
from qaudit.lab.run import Run, differences, run_of
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
    assert {f.name for f in fields(Run)} == set(CHANGES) | set(FREE) | FORK


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
    assert run_of(json.loads(json.dumps(run.table()))) == run


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "../up"}, "`name` is `../up` (letters, digits"),
        ({"steps": 0, "batch": 0}, "`batch` is 0 (at least 1)"),
        ({"accumulation": 3}, "`accumulation` is 3 (a divisor of the batch of 4)"),
        ({"save_at": (21,)}, "`save_at` holds 21 (from 1 to the 20 steps)"),
        ({"keep_at": (0,)}, "`keep_at` holds 0"),
        ({"schedule": build("constant", peak=0.0)}, "`peak` is 0 (above 0)"),
        ({"weight_decay": -1.0}, "`weight_decay` is -1 (at least 0)"),
        ({"betas": (0.9, 1.0)}, "`betas` is (0.9, 1.0) (each from 0 to below 1)"),
        ({"clip": 0.0}, "`clip` is 0 (above 0)"),
        ({"sam_rho": -0.1}, "`sam_rho` is -0.1 (at least 0)"),
        ({"ema_decay": 1.0}, "`ema_decay` is 1 (from 0 to below 1)"),
        ({"lawa": (1, 5)}, "`lawa` is 1 every 5 (at least 2"),
        ({"lawa": (3, 10)}, "a saved step is a multiple of 10 from 30 on"),
        ({"precision": "fp8"}, "`precision` is `fp8` (one of bf16, fp32)"),
        ({"attention": "magic"}, "`attention` is `magic` (one of sdpa, eager)"),
        ({"fork_at": 5}, "`fork_at` is 5 (0 without a parent)"),
        ({"parent": HELD}, "`name` is `stage1` (another than that of its parent)"),
    ],
)
def test_a_run_that_cannot_be_is_refused_with_what_is_allowed(changed, words):
    with pytest.raises(UsageError) as refusal:
        replace(HELD, **changed)
    assert words in str(refusal.value)


def test_every_wrong_value_is_named_at_once():
    with pytest.raises(UsageError) as refusal:
        replace(HELD, batch=0, clip=-1.0, precision="fp8")
    assert all(f"`{name}` is" in str(refusal.value) for name in ("batch", "clip", "precision"))
