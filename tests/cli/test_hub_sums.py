"""Soups that the disk does not hold, from names on the Hub to a card and to a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qaudit.checkpoints.safetensors import WeightFolder, headers
from qaudit.downloads.running_sum import RunningSum
from qaudit.errors import MachineError
from tests.support.cli import QUICK, Run, audit_of, refused, settings, weights_in
from tests.support.hub import Hub
from tests.support.models import save_model

REPO = "lab/long"
MIX = ("--soup", "last:6")


@pytest.fixture
def hub(place: Path, online: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a series of six."""
    root = online / "root" / REPO
    for seed in range(6):
        shutil.copytree(place / "series" / "step10", root / f"step{seed + 1}00")
        save_model(root / f"step{seed + 1}00", seed)
    settings(root, branch_per_revision=True)
    with Hub(online / "root").running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def budget(online: Path, hub: Hub) -> str:
    """Return room for one checkpoint and a sum."""
    folder = online / "root" / REPO / "step100"
    counts = [tensor.nbytes // 4 for tensor in headers(folder).values()]
    sizes = (folder / "model.safetensors").stat().st_size
    return str(sizes + 8 * (sum(counts) + max(counts)))


def measurements(folder: Path) -> list[dict[str, Any]]:
    document: Any = audit_of(folder)
    return list(document["measurements"])


def test_a_scan_says_what_it_sums_up_and_measures_the_same(
    qaudit: Run, place: Path, online: Path, budget: str
) -> None:
    asked = ("scan", REPO, *MIX, *QUICK)
    planned = qaudit(*asked, "--disk-budget", f"{budget}B", "--dry-run")
    assert planned.code == 0, planned.err
    assert "is summed up while its 6 members pass by" in " ".join(planned.out.split())
    tight = qaudit(*asked, "--disk-budget", f"{budget}B", "--out", "tight")
    assert tight.code == 0, tight.err
    assert weights_in(online / "hf") == []
    assert not (place / "tight" / "sums").exists()
    assert qaudit(*asked, "--out", "wide").code == 0
    ce = {
        out: {(m["subject"], m["scheme"]): m["ce"] for m in measurements(place / out)}
        for out in ("tight", "wide")
    }
    assert ce["tight"] == ce["wide"]


def test_a_soup_is_written_from_members_that_passed_by(
    qaudit: Run, place: Path, budget: str
) -> None:
    asked = ("soup", REPO, *MIX)
    tight = qaudit(*asked, "--disk-budget", f"{budget}B", "--out", "tight")
    assert tight.code == 0, tight.err
    assert "is summed up while its 6 members pass by" in " ".join(tight.err.split())
    assert sorted(p.name for p in place.glob(".*")) == []
    assert qaudit(*asked, "--out", "wide").code == 0
    a, b = WeightFolder(place / "tight"), WeightFolder(place / "wide")
    assert set(a.names()) == set(b.names())
    assert all(torch.equal(a.read(name), b.read(name)) for name in b.names())
    assert json.loads((place / "tight" / "config.json").read_text())


def test_a_soup_that_was_broken_off_goes_on(
    qaudit: Run, place: Path, hub: Hub, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, left = RunningSum.add, [3]

    def add(self: RunningSum, *rest: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise MachineError("the machine went away", hint="call it back")
        really(self, *rest)  # type: ignore[arg-type]

    asked = ("soup", REPO, *MIX, "--disk-budget", f"{budget}B", "--out", "new")
    with monkeypatch.context() as patched:
        patched.setattr(RunningSum, "add", add)
        refused(qaudit(*asked), 4, "the machine went away", "call it back")
    assert (place / ".new.begun").is_dir()
    assert not (place / "new").exists()
    hub.log.clear()
    assert qaudit(*asked).code == 0
    sent = {entry["path"] for entry in hub.log if "/cdn/" in entry["path"]}
    assert len(sent) <= 3  # the fourth may have come before
    assert sorted(p.name for p in place.glob(".*")) == []


def test_a_budget_that_is_not_enough_is_refused_before_any_weights(
    qaudit: Run, place: Path, online: Path, budget: str
) -> None:
    little = str(int(budget) - 1)
    done = qaudit("soup", REPO, *MIX, "--disk-budget", f"{little}B", "--out", "new")
    refused(done, 4, "for one of its 6 members and their running sum", "--disk-budget")
    assert not (place / "new").exists()
    assert weights_in(online / "hf") == []


def test_a_folder_that_is_there_is_refused_before_any_weights(
    qaudit: Run, place: Path, online: Path, hub: Hub
) -> None:
    done = qaudit("soup", REPO, *MIX, "--out", "series")
    refused(done, 2, "is there already", "is not")
    assert weights_in(online / "hf") == []
