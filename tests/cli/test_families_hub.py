"""Families of ours, once through the command from the Hub, with the tensors of their releases."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import released
from tests.support.cli import Run, audit_of, settings
from tests.support.hub import Hub

REPO = "swiss-ai/Apertus-8B-2509"
RATES = {"step50000-tokens210B": 1.1e-4, "step2627139-tokens15T": 1.10001e-5}


def test_apertus_is_audited_along_its_schedule(
    place: Path, scan: Run, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = online / "root"
    for seed, revision in enumerate(RATES):
        folder = released.save(root / REPO / revision, "apertus", seed)
        for file in (place / "series/step10").glob("tokenizer*"):
            shutil.copy(file, folder)
    settings(root / REPO, branch_per_revision=True)
    with Hub(root).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = scan(*(f"{REPO}@{revision}" for revision in RATES))
    assert done.code == 0, done.err
    audit = audit_of(place / "out")
    assert {(row["scheme"], row["kl"] is None) for row in audit["measurements"]} == {
        ("fp", True), ("rtn-4bit", False)
    }  # fmt: skip
    rates = [subject["learning_rate"] for subject in audit["subjects"]]
    assert rates == pytest.approx(list(RATES.values()), rel=1e-4)
