"""`qaudit pick`: one thing to ship from saved audits, by what matters to who ships."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qaudit.core.statistics import BINS
from qaudit.types import Fidelity
from tests.support import sample, saved_audits
from tests.support.cli import ROUNDED, audit_of
from tests.support.saved_audits import save

pytestmark = pytest.mark.usefixtures("exported")


def picked(qaudit, *more):
    return json.loads(qaudit("pick", "out", *more, "--json").out)


def test_a_pick_says_what_and_why_and_card_pick_and_gate_have_one_verdict(qaudit):
    done = qaudit("pick", "out", "--objective", "loss@rtn-3bit:group=32")
    assert done.code in (0, 3)
    assert "at rtn-3bit:group=32 has the lowest quantized loss" in " ".join(done.out.split())
    assert "nats per token" in done.out
    assert "yes" in done.out.split()
    front = qaudit("pick", "out", "--objective", "pareto", code=0)
    assert front.out.startswith("On the front: nothing with fewer bits is better.")
    saved = audit_of(Path("out"))["verdict"]
    answer = picked(qaudit)
    assert (saved, answer["pick"]["scheme"]) == (answer["verdict"], ROUNDED)
    assert {one["scheme"] for one in answer["pareto"]} == {"fp", ROUNDED, "rtn-3bit:group=32"}
    gate = qaudit("gate", "out", "--format", "json")
    assert saved["classes"] == json.loads(gate.out)["classes"]
    assert {"ship": 0, "hold": 1, "undecided": 3, "incomplete": 3}[saved["status"]] == gate.code
    # Classes are named by their bits.
    three = picked(qaudit, "--bits", "3")
    assert [one["bit_class"] for one in three["verdict"]["classes"]] == ["3"]
    assert three["pick"]["scheme"] == "rtn-3bit:group=32"
    eight = qaudit("gate", "out", "--bits", "8", "--format", "json", code=3)
    assert json.loads(eight.out)["classes"][0]["subject"] is None


def test_a_target_is_scanned_first(qaudit, place):
    recipe = "targets: series/step10\nschemes: rtn-4bit\ncalibration: calibration.jsonl\n"
    (place / "mine.yaml").write_text(recipe + "evaluation: evaluation.jsonl\n")
    done = qaudit("pick", "mine.yaml", "-q")
    assert done.code in (0, 3)
    assert "at rtn-4bit has the lowest quantized loss" in " ".join(done.out.split())
    assert (place / "qaudit-out" / "mine" / "audit.json").is_file()
    # Two audits of the same text are picked from together.
    for name, subject in zip(("one", "two"), sample.series()[-2:], strict=True):
        save(Path(name), subjects=(subject,))
    done = qaudit("pick", "one", "two", "--policy", "explore", "--json")
    pick = json.loads(done.out)["pick"]
    assert {pick["subject"], pick["runner_up"]} == {"stage2-ingredient3-step1000", "soup"}


def test_small_divergences_are_a_tie(qaudit, monkeypatch):
    found, kl = sample.measurements(64, 0), {"gptq-4bit": 0.02, "bnb-nf4": 0.03}
    monkeypatch.setattr(saved_audits, "SCHEMES", ("fp", *kl))
    for factor, code in ((1.0, 0), (0.01, 3)):
        diverging = [with_kl(m, factor * kl[m.scheme]) if m.scheme in kl else m for m in found]
        monkeypatch.setattr(sample, "measurements", lambda *_, all=tuple(diverging): all)
        save(Path("saved"), documents=64)
        done = qaudit("pick", "saved", "--objective", "kl", "--policy", "explore", "--json")
        (only,) = json.loads(done.out)["verdict"]["classes"]
        assert (done.code, bool(only["contenders"])) == (code, code == 3)


def with_kl(measurement, kl):
    """Return a measurement with about this divergence at every token."""
    evidence = measurement.evidence
    noise_D = 1 + 0.05 * np.sin(np.arange(len(evidence.tokens)))
    kl_D = kl * noise_D * (evidence.tokens > 0)
    counts = np.zeros((len(kl_D), BINS), dtype=np.int64)
    counts[:, 0] = evidence.tokens
    zeros_D = np.zeros(len(kl_D))
    fidelity = Fidelity(kl_D * evidence.tokens, kl_D, counts, evidence.tokens, zeros_D)
    return replace(measurement, evidence=replace(evidence, fidelity=fidelity))
