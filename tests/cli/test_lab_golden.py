"""An experiment at the smallest size gives the losses of the first version."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch
import transformers

from qaudit.lab.experiments.table import read_experiment
from qaudit.saved.evidence import read_saved
from tests.support.cli import Run
from tests.support.training import read_log

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/lab_smoke.json").read_text("utf-8"))
NATS = {"gptq": 0.02, "awq": 0.02}  # their arithmetic is chaotic; all others are exact


@pytest.mark.slow
def test_a_smoke_run_gives_the_losses_of_the_first_version(tmp_path: Path, qaudit: Run) -> None:
    versions = {
        "python": platform.python_version().rpartition(".")[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    golden = {**GOLDEN, "python": GOLDEN["python"].rpartition(".")[0]}
    if other := [name for name, version in versions.items() if version != golden[name]]:
        pytest.skip(f"the golden record was made by another {', '.join(other)}")
    if torch.get_num_threads() != GOLDEN["threads"]:
        pytest.skip(f"the golden record was made with {GOLDEN['threads']} thread")
    name = GOLDEN["command"].split()[3]
    done = qaudit("lab", "run", name, "--size", "smoke", "--out", tmp_path, "--quiet")
    assert done.code == 3, done.err  # smoke measures one scheme and compares more
    assert read_experiment(name).name == name
    logged = {
        (line["run"], str(line["step"])): line["loss"] for line in read_log(tmp_path / "runs")
    }
    for run, losses in GOLDEN["runs"].items():
        for step, loss in losses.items():
            assert logged[run, step] == pytest.approx(loss, abs=1e-4)  # logged with four digits
    saved = read_saved(tmp_path / f"{name}-smoke" / "seed-1").audit
    losses = {(m.subject, m.scheme): m.ce.estimate for m in saved.measurements}
    expected = {(s, q): ce for s, row in GOLDEN["losses"].items() for q, ce in row.items()}
    assert losses.keys() == expected.keys()
    for (subject, scheme), loss in expected.items():
        tolerance = NATS.get(scheme.partition("-")[0], 1e-6)
        assert losses[subject, scheme] == pytest.approx(loss, abs=tolerance), (subject, scheme)
