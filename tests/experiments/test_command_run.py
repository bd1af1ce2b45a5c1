"""`python -m experiments run`: train, scan and sum up; share runs, go on, and refuse by name."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch
import transformers

from experiments import seeds as run
from experiments.__main__ import commands
from experiments.science import read_summary
from experiments.summary import render_summary
from experiments.table import shipped_experiments
from experiments.text import TokenStream, prepare
from qaudit.saved.evidence import read_saved
from tests.support.cli import Run, refused, run_in
from tests.support.models import write_documents
from tests.support.training import read_log

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
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with two experiments of a few steps on a few words."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("common", COMMON), ("cooled", COOLED), ("averaged", AVERAGED)):
        Path(f"{name}.yaml").write_text(text, encoding="utf-8")
    write_documents(tmp_path / "words.jsonl", range(300))

    def stream(runs: Path, vocabulary: int) -> TokenStream:
        return prepare(runs.parent / "text", sources=["words.jsonl"], vocabulary=vocabulary)

    monkeypatch.setattr(run, "stream", stream)
    return tmp_path


@pytest.mark.slow
def test_an_experiment_is_trained_scanned_and_summed_up(
    tiny: Path, experiments: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = experiments("run", "cooled.yaml", "--seeds", 2, "--out", "out")
    assert done.code == 3, done.err  # one of its schemes is not measured at this size
    assert "not measured here yet" in done.err
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


def test_a_dry_run_says_the_price_of_all_and_does_nothing(
    tmp_path: Path, experiments: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = tuple(shipped_experiments())
    done = experiments("run", *names, "--size", "cpu", "--seeds", 3, "--dry-run")
    assert done.code == 0
    assert [line.partition(":")[0] for line in done.out.splitlines()[::2]] == list(names)
    lawa = done.out.splitlines()[2 * names.index("lawa") + 1]
    assert lawa.strip().startswith("0 runs to train")  # `budgets` before it trains them all
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", list(shipped_experiments()))
def test_a_seed_costs_half_an_hour_at_most(name: str, experiments: Run) -> None:
    done = experiments("run", name, "--size", "cpu", "--dry-run", "--out", "elsewhere")
    found = done.out.rpartition("about ")[2].split()
    assert found[1] == "min"
    assert int(found[0]) <= 30


def test_what_cannot_be_run_is_refused(experiments: Run) -> None:
    refused(experiments("run", "budget"), 2, "no experiment `budget`", "`budgets`")
    refused(experiments("run", "lawa", "--size", "huge"), 2, "no size `huge`", "smoke, cpu")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every experiment at the smallest size; few products give curvature."""
    folder = tmp_path_factory.mktemp("smoke")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "CURVATURE", "curvature:documents=2:probes=2:eigenvalues=0")
        code = run_in(
            folder, "run", *shipped_experiments(), "--out", ".", "--quiet", commands=commands
        )
    assert code == 3  # smoke measures under one scheme, and compares under more
    return folder


@pytest.mark.slow
def test_every_experiment_goes_together_at_the_smallest_size(smoke: Path) -> None:
    for name in shipped_experiments():
        summary = read_summary(smoke / f"{name}-smoke" / "summary.json")
        assert {p.subject for p in summary.points} == set(summary.subjects)
        assert (smoke / f"{name}-smoke" / "summary.svg").is_file()


@pytest.mark.slow
def test_a_smoke_run_gives_the_losses_of_the_first_version(smoke: Path) -> None:
    versions = {
        "python": platform.python_version().rpartition(".")[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    golden = {**GOLDEN, "python": GOLDEN["python"].rpartition(".")[0]}
    if other := [name for name, version in versions.items() if version != golden[name]]:
        pytest.skip(f"the golden record was made by another {', '.join(other)}")
    logged = {(line["run"], str(line["step"])): line["loss"] for line in read_log(smoke / "runs")}
    for name, losses in GOLDEN["runs"].items():
        for step, loss in losses.items():
            assert logged[name, step] == pytest.approx(loss, abs=1e-4)  # logged with four digits
    name = GOLDEN["command"].split()[4]
    saved = read_saved(smoke / f"{name}-smoke" / "seed-1").audit
    losses = {(m.subject, m.scheme): m.ce.estimate for m in saved.measurements}
    expected = {(s, q): ce for s, row in GOLDEN["losses"].items() for q, ce in row.items()}
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)
