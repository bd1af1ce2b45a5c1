"""The demo's losses are those that an earlier version measured, as recorded in demo.json.

Full precision, rtn and bnb-nf4 agree to 1e-6 nats. GPTQ and AWQ amplify the last bit of their
inputs, so they agree within 0.02 nats. bnb-int8 is recorded only: it depends on the processor. The
whole demo reads the documentation of Python itself, so its record also names a Python.
"""

import json
import platform
import shutil
from pathlib import Path

import pytest
import torch

from tests.house.source import PACKAGE, ROOT
from tests.support.cli import audit_of, settings

RECORD = json.loads(Path(__file__).with_name("demo.json").read_text("utf-8"))
THERE, TWO = RECORD["measured_with"], RECORD["two"]
SOUP = "+".join(TWO["checkpoints"])
REPO = "lab/demo"

same_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != THERE["torch"],
    reason=f"demo.json was measured with torch {THERE['torch']}, not {torch.__version__}",
)
same_python = pytest.mark.skipif(
    platform.python_version() != THERE["python"],
    reason=f"the demo's text is that of Python {THERE['python']}, not {platform.python_version()}",
)


def tolerance(scheme):
    """Return how far a loss may be from the record, in nats per token."""
    if scheme == "bnb-int8":
        return float("inf")
    return 0.02 if scheme.startswith(("gptq", "awq")) else 1e-6


def check_losses(folder, recorded):
    rows = audit_of(folder)["measurements"]
    first = [row for row in rows if row["calibration_seed"] == 0]  # of the calibration draws
    measured = {(row["subject"], row["scheme"]): row["ce"] for row in first}
    expected = {(s, scheme): ce for s, row in recorded.items() for scheme, ce in row.items()}
    assert measured.keys() == expected.keys()
    for (subject, scheme), ce in expected.items():
        found = measured[subject, scheme]
        assert abs(found - ce) <= tolerance(scheme), (subject, scheme)


def options(folder):
    """Return the options of the scan, with paragraphs of the license as text."""
    paragraphs = (ROOT / "LICENSE").read_text(encoding="utf-8").split("\n\n")
    long = [" ".join(p.split()) for p in paragraphs if len(" ".join(p.split())) > 200]
    for name, texts in (("calibration", long[:8]), ("evaluation", long[8:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    arguments = ["--schemes", TWO["schemes"], "--soup", SOUP]
    for setting in ("context=256", "document_tokens=160", "bos=always", "dtype=float32"):
        arguments += ["--set", setting]  # the demo's defaults
    for name in TWO["checkpoints"]:
        arguments += ["--checkpoints", name]
    for name in ("calibration", "evaluation"):
        arguments += [f"--{name}", folder / f"{name}.jsonl"]
    return arguments


@same_torch
def test_two_ingredients_their_soup_and_a_gate(qaudit, without_pictures, tmp_path):
    qaudit("scan", "demo", *options(tmp_path), "--out", tmp_path / "out", code=0)
    check_losses(tmp_path / "out", TWO["ce"])

    policy, answer = tmp_path / "policy.yaml", tmp_path / "gate.json"
    policy.write_text(json.dumps(TWO["policy"]), encoding="utf-8")
    done = qaudit("gate", tmp_path / "out", "--policy", policy, "--format", f"json={answer}")
    assert done.code == TWO["gate"]["code"], done.err
    gate = json.loads(answer.read_text(encoding="utf-8"))
    assert gate["verdict"] == TWO["gate"]["verdict"]
    outcomes = {f"{c['subject']} {c['scheme']}": c["outcome"] for c in gate["checks"]}
    assert outcomes == TWO["gate"]["checks"]


@same_torch
@pytest.mark.slow  # the folder is held every time, and both to the same numbers
@pytest.mark.usefixtures("without_pictures")
def test_a_series_on_the_hub(qaudit, online, serve, monkeypatch, tmp_path):
    for name in TWO["checkpoints"]:
        shutil.copytree(PACKAGE / "demo" / name, online / "root" / REPO / name)
    settings(online / "root" / REPO, branch_per_revision=True, main=None)
    monkeypatch.setenv("HF_ENDPOINT", serve(online / "root").url)
    scan = ["scan", REPO, "--set", "family=demo", *options(tmp_path), "--out", tmp_path / "out"]
    qaudit(*scan, code=0)
    check_losses(tmp_path / "out", TWO["ce"])


@same_torch
@same_python
@pytest.mark.slow
def test_the_whole_demo(qaudit, without_pictures, tmp_path):
    qaudit("scan", "demo", "--set", "dtype=float32", "--out", tmp_path / "out", code=0)
    check_losses(tmp_path / "out", RECORD["demo"]["ce"])
