"""Scans that are killed at any moment, again and again, end as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cli import TEXT, Run, audit_of, settings
from tests.support.hub import Hub

KILLS = 20
MAIN = "from qaudit.cli import main; main()"
SOUP = ("--soup", "step10+step200", "--schemes", "rtn-4bit,gptq-4bit:group=16")


def killed_after(seconds: float, place: Path, *arguments: str) -> int | None:
    """Start a scan in a process and kill it; return its code if it ended before that."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "scan", *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def numbers(folder: Path) -> list[tuple[object, ...]]:
    names = ("subject", "spec", "ce", "ce_low", "ce_high", "relative_error", "documents")
    return [tuple(row[name] for name in names) for row in audit_of(folder)["measurements"]]


def survive(place: Path, qaudit: Run, target: str, seed: int) -> None:
    """Kill a scan at random moments, let it end, and hold it to one that was left alone."""
    arguments = [target, *TEXT, *SOUP, "--out"]
    began = time.monotonic()
    assert killed_after(600, place, *arguments, "whole") == 0
    whole = time.monotonic() - began
    moments = random.Random(seed)
    codes = {
        killed_after(moments.uniform(0, whole), place, *arguments, "out") for _ in range(KILLS)
    }
    assert codes <= {None, 0}
    assert killed_after(600, place, *arguments, "out") == 0
    assert numbers(place / "out") == numbers(place / "whole")
    assert qaudit("gate", place / "out", "-q").code in (0, 1, 3)


@pytest.mark.slow
def test_kills_over_folders_change_nothing(place: Path, qaudit: Run) -> None:
    survive(place, qaudit, "series", seed=1)


@pytest.mark.slow
def test_kills_over_the_hub_change_nothing(
    place: Path, online: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (online / "root" / "lab").mkdir(parents=True)
    shutil.move(place / "series", online / "root" / "lab" / "tiny")
    settings(online / "root" / "lab" / "tiny", branch_per_revision=True)
    with Hub(online / "root").running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        survive(place, qaudit, "lab/tiny", seed=2)
