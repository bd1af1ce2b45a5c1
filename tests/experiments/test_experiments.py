"""Experiments: what their files may say, which runs they need, what those share, what they cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from experiments.plan import LabPrice, PlannedRun, planned_runs, price, save_rate
from experiments.seeds import link_series
from experiments.table import (
    FOLDER,
    SIZES,
    Experiment,
    place_of,
    read_experiment,
    shipped_experiments,
)
from qaudit.core.schedules import WarmupStableDecay
from qaudit.errors import RecipeError
from tests.support.series import find_checkpoints

NAMES = tuple(shipped_experiments())


def runs_of(name: str, size: str = "cpu", seed: int = 1) -> dict[str, PlannedRun]:
    return {t.name: t for t in planned_runs(read_experiment(name), size, seed)}


def written(folder: Path, **changes: object) -> Path:
    """Write the shipped experiment `lawa` with some of its keys changed."""
    table = yaml.safe_load((FOLDER / "lawa.yaml").read_text(encoding="utf-8"))
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**table, **changes}), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------ those that ship


def test_the_seven_experiments_ship() -> None:
    assert NAMES == ("budgets", "decay", "forks", "lawa", "peaks", "wsd-cosine", "wsm")


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_has_every_size_and_an_answer_to_every_claim(name: str) -> None:
    experiment = read_experiment(name)
    assert set(experiment.sizes) == set(SIZES)
    assert {c.claim for c in experiment.contrasts} == {c.name for c in experiment.claims}
    for size in SIZES:
        assert planned_runs(experiment, size, 1)


def needed_schemes(experiment: Experiment) -> set[str]:
    return {scheme for c in experiment.contrasts for scheme in c.schemes} - {"fp"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", ["cpu", "gpu"])
def test_what_is_compared_is_measured(name: str, size: str) -> None:
    experiment = read_experiment(name)
    assert needed_schemes(experiment) <= set(experiment.sizes[size].schemes)


@pytest.mark.parametrize("name", NAMES)
def test_smoke_compares_under_something_that_it_measures(name: str) -> None:
    experiment = read_experiment(name)
    assert needed_schemes(experiment) & set(experiment.sizes["smoke"].schemes)


# ------------------------------------------------------------------------------ which runs, shared


def test_the_held_run_is_one_run_in_all_experiments_that_start_from_it() -> None:
    keys = {runs_of(name)["held"].run.key for name in ("budgets", "wsd-cosine", "lawa", "forks")}
    assert len(keys) == 1
    cooled = {runs_of(name)["cool8"].run.key for name in ("budgets", "wsd-cosine", "lawa")}
    assert len(cooled) == 1


def test_runs_that_are_alike_are_one_whatever_they_are_called(tmp_path: Path) -> None:
    a, b = runs_of("peaks")["peak3e-3"], runs_of("decay")["tenth"]
    assert a.run.key == b.run.key
    assert list(a.folders(tmp_path).values()) == list(b.folders(tmp_path).values())
    assert list(a.folders(tmp_path)) == ["peak3e-3-step2000", "peak3e-3-step3000"]


def test_runs_that_nothing_is_measured_of_are_left_out() -> None:
    assert "held" not in runs_of("peaks")


@pytest.mark.parametrize("what", ["seed", "size", "run"])
def test_other_runs_have_other_keys(what: str) -> None:
    one = runs_of("budgets")["cool8"]
    others = {
        "seed": runs_of("budgets", seed=2)["cool8"],
        "size": runs_of("budgets", "smoke")["cool8"],
        "run": runs_of("budgets")["cool4"],
    }
    assert one.run.key != others[what].run.key


def test_forks_of_one_state_see_the_same_data_and_not_what_their_parent_began_with() -> None:
    runs = runs_of("forks")
    orders = {runs[name].run.order for name in ("cosine-on", "restarts", "lock-in")}
    assert len(orders) == 1
    assert runs["held"].run.order not in orders
    assert all(runs[n].run.parent == runs["held"].run for n in ("cosine-on", "restarts"))


def test_lengths_in_units_become_steps() -> None:
    run = runs_of("peaks")["peak1e-2"].run
    assert run.schedule == WarmupStableDecay(
        peak=0.01, warmup=100, decay_start=2000, decay_length=1000
    )
    assert (run.steps, run.save_at) == (3000, (2000, 3000))
    restarts = runs_of("forks")["restarts"].run
    assert restarts.schedule.at(500) == pytest.approx(0.1 * restarts.schedule.peak)
    assert restarts.schedule.at(501) > 0.99 * restarts.schedule.peak


def test_a_decay_and_a_cosine_end_after_the_same_tokens() -> None:
    runs = runs_of("wsd-cosine")
    cooled = runs["cool8"].run
    assert cooled.fork_at + cooled.steps == runs["cosine"].run.steps == runs["held"].run.steps
    assert cooled.schedule.at(cooled.steps) == runs["cosine"].run.schedule.at(5000) == 0


def test_every_place_that_is_measured_is_saved_and_every_fork_has_a_state() -> None:
    for name in NAMES:
        experiment = read_experiment(name)
        for size in SIZES:
            runs = {t.name: t for t in planned_runs(experiment, size, 1)}
            for place in experiment.scan:
                label = experiment.sizes[size].label(place)
                assert label in runs[place_of(place)[0]].folders(Path())
            for training in runs.values():
                parent = training.run.parent
                if parent is not None:
                    assert training.run.fork_at in (*parent.keep_at, parent.steps)


# ------------------------------------------------------------------------------ the series


def test_the_series_knows_the_true_rate_and_tokens_of_every_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    wanted = planned_runs(read_experiment("wsd-cosine"), "cpu", 1)
    for training in wanted:
        for folder in training.folders(runs).values():
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}", encoding="utf-8")
    for _ in range(2):  # laid out again, it is the same
        series = link_series(wanted, runs, tmp_path / "series")
    found = {c.label: c for c in find_checkpoints(series, hashed=False)}
    per_step = wanted[0].run.tokens_per_step
    for training in wanted:
        run = training.run
        for step in run.save_at:
            checkpoint = found[f"{training.name}-step{step}"]
            assert checkpoint.learning_rate == pytest.approx(run.schedule.at(step))
            assert checkpoint.tokens == (run.fork_at + step) * per_step
            assert checkpoint.stage == training.name


# ------------------------------------------------------------------------------ the price


def priced(runs: Path, *, scanned: tuple[int, ...] = (), seeds: tuple[int, ...] = (1,)) -> LabPrice:
    experiment = read_experiment("lawa")
    wanted = [t for seed in seeds for t in planned_runs(experiment, "cpu", seed)]
    return price(experiment, "cpu", wanted, runs_folder=runs, scanned=scanned, seeds=seeds)


def test_a_price_is_steps_times_tokens_and_measurements(tmp_path: Path) -> None:
    found = priced(tmp_path)
    size = read_experiment("lawa").sizes["cpu"]
    assert found.tokens == (5000 + 1000) * 4 * 256
    assert found.measurements == (3 + 2) * (1 + len(size.schemes))
    seconds = found.tokens / size.tokens_per_second
    seconds += found.measurements * size.seconds_per_measurement
    assert found.seconds == pytest.approx(seconds)
    assert (found.runs, found.runs_trained, found.is_rate_measured) == (2, 0, False)


def test_what_is_there_costs_nothing(tmp_path: Path) -> None:
    held = runs_of("lawa")["held"]
    for folder in held.folders(tmp_path).values():
        folder.mkdir()
        (folder / "config.json").write_text("{}", encoding="utf-8")
    found = priced(tmp_path, scanned=(1,))
    assert (found.runs, found.runs_trained, found.measurements) == (1, 1, 0)
    assert found.tokens == 1000 * 4 * 256


def test_a_run_that_lacks_a_checkpoint_is_not_there(tmp_path: Path) -> None:
    held = runs_of("lawa")["held"]
    for folder in list(held.folders(tmp_path).values())[1:]:
        folder.mkdir()
        (folder / "config.json").write_text("{}", encoding="utf-8")
    assert priced(tmp_path).runs_trained == 0


def test_seeds_cost_alike(tmp_path: Path) -> None:
    assert priced(tmp_path, seeds=(1, 2, 3)).tokens == 3 * priced(tmp_path).tokens


def test_a_rate_that_was_measured_goes_before_the_expected_one(tmp_path: Path) -> None:
    save_rate(tmp_path, "cpu", 2000.0)
    save_rate(tmp_path, "smoke", 7.0)
    found = priced(tmp_path)
    assert (found.tokens_per_second, found.is_rate_measured) == (2000.0, True)
    (tmp_path / "rates.json").write_text(json.dumps([1]), encoding="utf-8")
    assert not priced(tmp_path).is_rate_measured


# ------------------------------------------------------------------------------ what is refused


def contrast(**changes: object) -> list[dict[str, object]]:
    given = {"claim": "averages-lose-less", "says": "x", "a": "lawa", "b": "held@10"}
    return [{**given, "schemes": ["rtn-3bit"], **changes}]


@pytest.mark.parametrize(
    ("changes", "sentence", "hint"),
    [
        ({"scann": []}, "there is no key `scann`", "`scan`"),
        ({"scan": ["held@11"]}, "`held@11` is past the end of `held`", "it has 10 units"),
        ({"scan": ["hold@8"]}, "`hold@8` is on no earlier run", "did you mean `held`?"),
        ({"scan": ["held8"]}, "`held8` is no place on a run", "write `held@8`"),
        ({"scan": ["held@8", "held@8"]}, "two subjects are named `held@8`", "its own name"),
        (
            {"scan": ["held@0.001"], "contrasts": []},
            "`held@0.001` is no whole step at size `smoke`",
            "5 steps",
        ),
        (
            {"runs": [{"name": "c", "from": "held@6", "units": 1, "schedule": {"kind": "linear"}}]},
            "no run can start at `held@6`",
            "keeps its state at 2, 4, 8, 10",
        ),
        (
            {"runs": [{"name": "held", "units": 1, "schedule": {"kind": "linear"}}]},
            "two runs are named `held`",
            "its own name",
        ),
        (
            {"runs": [{"name": "c", "units": 1, "schedule": {}, "weight_dekay": 1}]},
            "there is no key `runs[1].weight_dekay`",
            "did you mean `weight_decay`?",
        ),
        ({"sizes": {"laptop": {}}}, "there is no size `laptop`", "smoke"),
        ({"sizes": {"cpu": 3}}, "`sizes.cpu` is `3`", "a table"),
        ({"sizes": {"cpu": {"bach": 3}}}, "there is no key `sizes.cpu.bach`", "`batch`"),
        ({"sizes": {"cpu": {"model": "gpt-5"}}}, "`gpt-5` with {} is no model", ""),
        ({"contrasts": contrast(a="lava")}, "`lava` is compared and not scanned", "`lawa`"),
        ({"contrasts": contrast(claim="x")}, "there is no claim `x`", "one of"),
        ({"contrasts": contrast(schemes=["rtm-3bit"])}, "there is no scheme `rtm", "`rtn"),
        ({"contrasts": contrast(expect="near")}, "`near` needs a margin", ""),
        ({"contrasts": contrast(schemes=["fp"])}, "`fp` loses nothing", "measure its loss"),
        ({"contrasts": contrast(measure="eror")}, "`contrasts[0].measure` is `eror`", "error"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_what_is_wrong(
    changes: dict[str, object], sentence: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        read_experiment(str(written(tmp_path, **changes)))
    assert sentence in caught.value.message
    assert hint in caught.value.hint


def test_a_schedule_that_does_not_exist_is_refused_by_its_run(tmp_path: Path) -> None:
    wrong = {"name": "cool8", "from": "held@8", "units": 2, "schedule": {"kind": "linar"}}
    experiment = read_experiment(str(written(tmp_path, runs=[wrong])))
    with pytest.raises(RecipeError, match=r"run `cool8`: `schedule`: unknown schedule `linar`"):
        planned_runs(experiment, "cpu", 1)


def test_an_experiment_nearly_called_so_is_named() -> None:
    with pytest.raises(RecipeError) as caught:
        read_experiment("budget")
    assert caught.value.hint == "did you mean `budgets`?"


def test_an_experiment_of_one_s_own_uses_the_shipped_sizes(tmp_path: Path) -> None:
    path = written(tmp_path, sizes={"cpu": {"batch": 8}})
    mine = read_experiment(str(path))
    assert mine.sizes["cpu"].batch == 8
    assert mine.sizes["gpu"] == read_experiment("lawa").sizes["gpu"]
