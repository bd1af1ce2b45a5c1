"""Experiments: what their files may say, which runs they need, what those share, what they cost."""

import json
import platform
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from experiments import seeds
from experiments.__main__ import commands
from experiments.science import read_summary
from experiments.seeds import link_series, planned_runs, price
from experiments.summary import render_summary
from experiments.table import FOLDER, SIZES, place_of, read_experiment, shipped_experiments
from experiments.text import prepare
from qaudit.core.schedules import WarmupStableDecay
from qaudit.errors import RecipeError
from qaudit.saved.evidence import read_saved
from tests.support.cli import refused, run_in
from tests.support.models import write_documents
from tests.support.series import find_checkpoints
from tests.support.training import read_log

NAMES = tuple(shipped_experiments())


def runs_of(name, size="cpu", seed=1):
    return {t.name: t for t in planned_runs(read_experiment(name), size, seed)}


def written(folder, **changes):
    """Write the shipped experiment `lawa` with some of its keys changed."""
    table = yaml.safe_load((FOLDER / "lawa.yaml").read_text(encoding="utf-8"))
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**table, **changes}), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------ those that ship


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_has_all_sizes_and_places_it_measures(name, experiments):
    experiment = read_experiment(name)
    assert set(experiment.sizes) == set(SIZES)
    assert {c.claim for c in experiment.contrasts} == {c.name for c in experiment.claims}
    compared = {scheme for c in experiment.contrasts for scheme in c.schemes} - {"fp"}
    assert compared & set(experiment.sizes["smoke"].schemes)
    for size in SIZES:
        assert size == "smoke" or compared <= set(experiment.sizes[size].schemes)
        runs = runs_of(name, size)
        for place in experiment.scan:
            label = experiment.sizes[size].label(place)
            assert label in runs[place_of(place)[0]].folders(Path())
        for run in (training.run for training in runs.values() if training.run.parent):
            assert run.fork_at in (*run.parent.keep_at, run.parent.steps)
    done = experiments("run", name, "--size", "cpu", "--dry-run", "--out", "elsewhere")
    minutes, unit, *_ = done.out.rpartition("about ")[2].split()
    assert (unit, int(minutes) <= 30) == ("min", True)  # for a seed


def test_runs_that_are_alike_are_one_whatever_they_are_called(tmp_path):
    for run, names in (("held", ("budgets", "wsd-cosine", "lawa", "forks")),
                       ("cool8", ("budgets", "wsd-cosine", "lawa"))):  # fmt: skip
        assert len({runs_of(name)[run].run.key for name in names}) == 1
    a, b = runs_of("peaks")["peak3e-3"], runs_of("decay")["tenth"]
    assert a.run.key == b.run.key
    assert list(a.folders(tmp_path).values()) == list(b.folders(tmp_path).values())
    assert list(a.folders(tmp_path)) == ["peak3e-3-step2000", "peak3e-3-step3000"]
    assert "held" not in runs_of("peaks")  # nothing is measured of it
    runs = runs_of("forks")  # forks of one state see the same data, and not that of their parent
    orders = {runs[name].run.order for name in ("cosine-on", "restarts", "lock-in")}
    assert len(orders) == 1
    assert runs["held"].run.order not in orders
    assert all(runs[n].run.parent == runs["held"].run for n in ("cosine-on", "restarts"))
    # Lengths in units become steps, and runs that are compared end after the same.
    run = runs_of("peaks")["peak1e-2"].run
    schedule = WarmupStableDecay(peak=0.01, warmup=100, decay_start=2000, decay_length=1000)
    assert (run.schedule, run.steps, run.save_at) == (schedule, 3000, (2000, 3000))
    restarts = runs_of("forks")["restarts"].run
    assert restarts.schedule.at(500) == pytest.approx(0.1 * restarts.schedule.peak)
    assert restarts.schedule.at(501) > 0.99 * restarts.schedule.peak
    runs = runs_of("wsd-cosine")
    cooled = runs["cool8"].run
    assert cooled.fork_at + cooled.steps == runs["cosine"].run.steps == runs["held"].run.steps
    assert cooled.schedule.at(cooled.steps) == runs["cosine"].run.schedule.at(5000) == 0


def test_the_series_knows_the_true_rate_and_tokens_of_every_run(tmp_path):
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


def test_a_price_is_steps_times_tokens_and_missing_measurements(tmp_path):
    experiment, wanted = read_experiment("lawa"), tuple(runs_of("lawa").values())

    def priced(scanned):
        given = {"runs_folder": tmp_path, "scanned": scanned, "seeds": (1,)}
        return price(experiment, "cpu", wanted, **given)

    whole, size = priced(()), experiment.sizes["cpu"]
    assert whole.tokens == (5000 + 1000) * 4 * 256
    assert whole.measurements == (3 + 2) * (1 + len(size.schemes))
    seconds = whole.tokens / size.tokens_per_second
    seconds += whole.measurements * size.seconds_per_measurement
    assert whole.seconds == pytest.approx(seconds)
    assert (whole.runs, whole.runs_trained) == (2, 0)
    first, *rest = runs_of("lawa")["held"].folders(tmp_path).values()
    for folder in (*rest, first):
        assert priced((1,)).runs_trained == 0
        folder.mkdir()
        (folder / "config.json").write_text("{}", encoding="utf-8")
    found = priced((1,))
    assert (found.runs, found.runs_trained, found.measurements) == (1, 1, 0)
    assert found.tokens == 1000 * 4 * 256


def run_of(name, **keys):
    return {"name": name, "units": 1, "schedule": {"kind": "linear"}, **keys}


def test_a_wrong_file_is_refused_by_name_and_an_own_one_uses_what_ships(tmp_path):
    def contrast(**changes):
        given = {"claim": "averages-lose-less", "says": "x", "a": "lawa", "b": "held@10"}
        return [{**given, "schemes": ["rtn-3bit"], **changes}]

    for changes, sentence, hint in (
        ({"scann": []}, "there is no key `scann`", "`scan`"),
        ({"scan": ["held@11"]}, "`held@11` is past the end of `held`", "it has 10 units"),
        ({"scan": ["hold@8"]}, "`hold@8` is on no earlier run", "did you mean `held`?"),
        ({"scan": ["held8"]}, "`held8` is no place on a run", "write `held@8`"),
        ({"scan": ["held@8", "held@8"]}, "two subjects are named `held@8`", "its own name"),
        ({"scan": ["held@0.001"], "contrasts": []}, "is no whole step at size `smoke`", "5 steps"),
        ({"runs": [run_of("c", **{"from": "held@6"})]}, "no run can start at `held@6`",
         "keeps its state at 2, 4, 8, 10"),
        ({"runs": [run_of("held")]}, "two runs are named `held`", "its own name"),
        ({"runs": [run_of("c", weight_dekay=1)]}, "there is no key `runs[1].weight_dekay`",
         "did you mean `weight_decay`?"),
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
    ):  # fmt: skip
        with pytest.raises(RecipeError) as caught:
            read_experiment(str(written(tmp_path, **changes)))
        assert sentence in caught.value.message
        assert hint in caught.value.hint
    mine = read_experiment(str(written(tmp_path, sizes={"cpu": {"batch": 8}})))
    assert mine.sizes["cpu"].batch == 8
    assert mine.sizes["gpu"] == read_experiment("lawa").sizes["gpu"]
    wrong = run_of("cool8", **{"from": "held@8", "units": 2, "schedule": {"kind": "linar"}})
    experiment = read_experiment(str(written(tmp_path, runs=[wrong])))
    with pytest.raises(RecipeError, match=r"run `cool8`: `schedule`: unknown schedule `linar`"):
        planned_runs(experiment, "cpu", 1)


# --------------------------------------------------------------------------------------------------
# `python -m experiments run`: train, scan and sum up; share runs, go on, and refuse by name.


GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden/experiments_smoke.json").read_text("utf-8")
)

COMMON = """
sizes:
  smoke: {model: olmo2-1m, changes: {hidden: 32, ffn: 32, layers: 1, heads: 2, kv_heads: 1,
    vocabulary: 300, context: 32}, batch: 2, unit_steps: 2, warmup_steps: 1, peak: 0.01,
    schemes: [rtn-3bit], evaluation_documents: 10, calibration_documents: 2, document_tokens: 30,
    tokens_per_second: 1000, seconds_per_measurement: 0.1}
runs:
  - {name: held, units: 3, schedule: {kind: constant}, states: [2]}
"""
COOLED = """
description: A tiny one.
runs:
  - {name: cool, from: held@2, units: 1, schedule: {kind: linear}}
scan: [held@3, cool@1]
claims: [{name: it-differs, source: nobody, says: Decay is another thing.}]
contrasts:
  - {claim: it-differs, says: at the end, a: cool@1, b: held@3, schemes: [rtn-3bit, gptq-3bit]}
"""
AVERAGED = """
description: An average.
scan: [held@2, held@3]
soups: [{label: both, of: [held@2, held@3]}]
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Return a working directory with two experiments of a few steps on a few words."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("common", COMMON), ("cooled", COOLED), ("averaged", AVERAGED)):
        Path(f"{name}.yaml").write_text(text, encoding="utf-8")
    write_documents(tmp_path / "words.jsonl", range(300))

    def of_words(folder, *, vocabulary):
        return prepare(folder, sources=["words.jsonl"], vocabulary=vocabulary)

    monkeypatch.setattr("experiments.text.prepare", of_words)
    return tmp_path


@pytest.mark.slow
def test_an_experiment_is_trained_scanned_and_summed_up(tiny, experiments, monkeypatch):
    done = experiments("run", "cooled.yaml", "--seeds", 2, "--out", "out")
    assert done.code == 3, done.err  # one of its schemes is not measured at this size
    folder = tiny / "out" / "cooled-smoke"
    summary = read_summary(folder / "summary.json")
    assert (summary.seeds, summary.documents) == ((1, 2), 10)
    assert done.out == render_summary(summary)
    measured, missing = summary.results
    assert [one.seed for one in measured.seeds] == [1, 2]
    assert (measured.standing, missing.standing) == ("open", "not measured")
    for seed in (1, 2):
        audit = json.loads((folder / f"seed-{seed}" / "audit.json").read_text(encoding="utf-8"))
        assert [s["label"] for s in audit["subjects"]] == ["held-step6", "cool-step2"]
        assert [s["learning_rate"] for s in audit["subjects"]] == [0.01, 0]
        assert [s["tokens_seen"] for s in audit["subjects"]] == [6 * 64, 6 * 64]
        assert (folder / f"seed-{seed}" / "card.md").is_file()
    before = {path: path.stat().st_mtime_ns for path in (tiny / "out" / "runs").rglob("*.pt")}

    averaged = experiments("run", "averaged.yaml", "--json", "--out", "out")
    assert averaged.code == 0, averaged.err
    assert "0 runs to train, 1 are trained" in averaged.err
    both = json.loads(averaged.out)
    assert both["subjects"] == ["held@2", "held@3", "both"]
    assert {point["subject"] for point in both["points"]} == {"held@2", "held@3", "both"}
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_a_dry_run_says_the_price_of_all_and_does_nothing(tmp_path, experiments, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = tuple(shipped_experiments())
    done = experiments("run", *names, "--size", "cpu", "--seeds", 3, "--dry-run")
    assert done.code == 0
    assert [line.partition(":")[0] for line in done.out.splitlines()[::2]] == list(names)
    lawa = done.out.splitlines()[2 * names.index("lawa") + 1]
    assert lawa.strip().startswith("0 runs to train")  # `budgets` before it trains them all
    assert list(tmp_path.iterdir()) == []
    refused(experiments("run", "budget"), 2, "no experiment `budget`", "`budgets`")
    refused(experiments("run", "lawa", "--size", "huge"), 2, "no size `huge`", "smoke, cpu")


@pytest.mark.slow
def test_every_experiment_goes_together_and_gives_the_losses_of_the_first_version(
    tmp_path, monkeypatch
):
    few = "curvature:documents=2:probes=2:eigenvalues=0"
    monkeypatch.setattr(seeds, "CURVATURE", few)
    names = tuple(shipped_experiments())
    code = run_in(tmp_path, "run", *names, "--out", ".", "--quiet", commands=commands)
    assert code == 3  # smoke measures under one scheme, and compares under more
    for name in names:
        summary = read_summary(tmp_path / f"{name}-smoke" / "summary.json")
        assert {p.subject for p in summary.points} == set(summary.subjects)
        assert (tmp_path / f"{name}-smoke" / "summary.svg").is_file()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    golden = {**GOLDEN, "python": GOLDEN["python"].rpartition(".")[0]}
    versions["python"] = versions["python"].rpartition(".")[0]
    if other := [name for name, version in versions.items() if version != golden[name]]:
        pytest.skip(f"the golden record was made by another {', '.join(other)}")
    logged = {
        (line["run"], str(line["step"])): line["loss"] for line in read_log(tmp_path / "runs")
    }
    for name, losses in GOLDEN["runs"].items():
        for step, loss in losses.items():
            assert logged[name, step] == pytest.approx(loss, abs=1e-4)  # logged with four digits
    name = GOLDEN["command"].split()[4]
    saved = read_saved(tmp_path / f"{name}-smoke" / "seed-1").audit
    losses = {(m.subject, m.scheme): m.ce.estimate for m in saved.measurements}
    expected = {(s, q): ce for s, row in GOLDEN["losses"].items() for q, ce in row.items()}
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)
