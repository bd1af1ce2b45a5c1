"""The family's file that a trainer leaves: what a scan knows of its checkpoints without options."""

from dataclasses import replace

import pytest

from experiments.folder import family_table
from experiments.train import train
from qaudit.checkpoints.folder import find_all
from qaudit.core.schedules import build
from qaudit.families import Family, load_file
from tests.support.training import DECAY, HELD, read_log

AVERAGED = replace(HELD, ema_decay=0.5, lawa=(2, 5), schedule=build("cosine", peak=1e-2, end=25))
SGDR = replace(
    DECAY,
    name="forked",
    parent=AVERAGED,
    schedule=build("sgdr", peak=8e-3, period=4),
    save_at=(8, 10),
)
INGREDIENTS = [
    replace(DECAY, name=f"stage2-ingredient{k}", parent=AVERAGED, seed=k) for k in (1, 2)
]


@pytest.fixture(scope="module")
def series(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("runs") / "series"
    for run in (AVERAGED, SGDR, *INGREDIENTS):
        train(run, text, out)
    return out


def test_learning_rates_are_those_that_were_logged(series):
    logged = {(line["run"], line["step"]): line["learning_rate"] for line in read_log(series)}
    found = {c.label: c for c in find_all([str(series)])}
    for run in (AVERAGED, SGDR, *INGREDIENTS):
        for step in run.save_at:
            checkpoint = found[run.label(step)]
            assert checkpoint.learning_rate == logged[(run.name, step)]
            assert checkpoint.step == step
            for average in run.averages:
                assert found[run.label(step, average)].learning_rate == logged[(run.name, step)]
    assert all(c.family == "lab-series" for c in found.values())


def test_tokens_are_counted_from_the_very_start(series):
    found = {c.label: c for c in find_all([str(series)])}
    assert found["stage1-step10"].tokens == 10 * 4 * 8
    assert found["stage1-lawa-step20"].tokens == 20 * 4 * 8
    assert found["forked-step8"].tokens == found["stage2-ingredient1-step10"].tokens - 2 * 4 * 8
    assert found["stage2-ingredient2-step10"].tokens == (20 + 10) * 4 * 8


def test_ingredients_of_one_point_are_one_stage(series):
    found = [c for c in find_all([str(series)]) if c.ingredient]
    assert [(c.stage, c.ingredient, c.step) for c in found] == [
        ("stage2", 1, 10),
        ("stage2", 2, 10),
    ]


def test_a_series_is_in_the_order_of_its_training(series):
    stages = list(dict.fromkeys(c.stage for c in find_all([str(series)])))
    assert stages.index("stage1") < min(stages.index("forked"), stages.index("stage2"))
    assert stages.index("stage2") < stages.index("stage1-lawa")


def test_ingredients_with_schedules_of_their_own_keep_them():
    steeper = replace(INGREDIENTS[1], schedule=build("linear", peak=5e-3, end=10))
    family = Family.model_validate(family_table("x", [INGREDIENTS[0], steeper]))
    rates = [family.learning_rate(family.place(f"stage2-ingredient{k}-step0")) for k in (1, 2)]
    assert rates == [1e-2, 5e-3]


def test_ingredients_of_two_points_are_two_stages():
    later = replace(INGREDIENTS[1], fork_at=10)
    family = Family.model_validate(family_table("x", [INGREDIENTS[0], later]))
    tokens = [family.tokens(family.place(f"stage2-ingredient{k}-step10")) for k in (1, 2)]
    assert tokens == [30 * 32, 20 * 32]


def test_the_parent_of_a_fork_is_told_of_where_it_does_not_lie(tmp_path, text, series):
    train(replace(SGDR, name="away"), text, tmp_path, fork=series)
    (first, last) = find_all([str(tmp_path)])
    assert (first.tokens, last.tokens) == (28 * 32, 30 * 32)
    family = load_file(tmp_path / "qaudit-family.yaml")
    assert [stage.name for stage in family.stages] == [
        "stage1",
        "away",
        "stage1-ema",
        "stage1-lawa",
    ]
