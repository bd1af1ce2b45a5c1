"""Soups whose members are on the Hub, under a disk budget."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import QUICK, Run, audit_of, refused, settings, weights_in
from tests.support.hub import Hub
from tests.support.models import save_model

REPO = "lab/long"
MIX = ("--soup", "last:2")


@pytest.fixture
def hub(place: Path, online: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a series of three."""
    root = online / "root" / REPO
    for seed in range(3):
        shutil.copytree(place / "series" / "step10", root / f"step{seed + 1}00")
        save_model(root / f"step{seed + 1}00", seed)
    settings(root, branch_per_revision=True)
    with Hub(online / "root").running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def budget(online: Path, hub: Hub) -> int:
    """Return room for two checkpoints."""
    return 2 * (online / "root" / REPO / "step100" / "model.safetensors").stat().st_size


def test_members_stay_until_their_soup_is_measured(
    qaudit: Run, place: Path, online: Path, hub: Hub, budget: int
) -> None:
    scan = ("scan", REPO, *MIX, *QUICK, "--set", f"disk_budget={budget}B", "--out", "tight")
    done = qaudit(*scan)
    assert done.code == 0, done.err
    assert not audit_of(place / "tight")["skipped"]
    assert weights_in(online / "hf") == []
    sent = [e["path"] for e in hub.asked("GET /cdn/") if e["range"] in (None, "bytes=0-")]
    assert len(sent) == len(set(sent)) == 3  # nothing is downloaded twice


@pytest.mark.parametrize("command", [("scan", *QUICK), ("soup",)])
def test_a_budget_below_the_members_of_a_soup_is_refused_before_any_weights(
    qaudit: Run, place: Path, online: Path, budget: int, command: tuple[str, ...]
) -> None:
    name, *options = command
    done = qaudit(name, REPO, *MIX, *options, "--set", f"disk_budget={budget - 1}B", "--out", "new")
    refused(done, 4, "for its 2 members at once", "disk_budget=")
    assert not (place / "new" / "audit.json").exists()
    assert weights_in(online / "hf") == []


def test_a_soup_is_written_from_members_under_a_budget(
    qaudit: Run, place: Path, online: Path, budget: int
) -> None:
    done = qaudit("soup", REPO, *MIX, "--set", f"disk_budget={budget}B", "--out", "new")
    assert done.code == 0, done.err
    assert sorted(p.name for p in place.glob(".*")) == []
    assert json.loads((place / "new" / "config.json").read_text())
    assert weights_in(online / "hf") == []


def test_a_folder_that_is_there_is_refused_before_any_weights(
    qaudit: Run, place: Path, online: Path, hub: Hub
) -> None:
    done = qaudit("soup", REPO, *MIX, "--out", "series")
    refused(done, 2, "exists already", "does not exist yet")
    assert weights_in(online / "hf") == []
