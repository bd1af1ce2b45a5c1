"""A scan that is killed within a subject goes on at the block that it had come to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qaudit.model.blocks import Block, BlockModel
from tests.support.cli import QUICK, Run, audit_of

# Keeps its pass at every block, says so at the entrance of the second, and waits to be killed.
STOPS = """
import time
import qaudit.engine.kept_pass
from qaudit.cli import main
from qaudit.cli.progress import Progress

qaudit.engine.kept_pass.EVERY_SECONDS = 0.0

def block(self, done, total, what):
    if done == 1:
        print("in the middle", flush=True)
        time.sleep(600)

Progress.block = block
main()
"""


def killed_in_the_middle(place: Path, *more: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPS, "scan", "series/step10", *QUICK, *more],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in the middle\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


@pytest.fixture
def firsts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the block at which each pass begins."""
    begun: list[int] = []
    really = BlockModel.blocks

    def blocks(self: Any, first: int = 0) -> Iterator[Block]:
        begun.append(first)
        return really(self, first)

    monkeypatch.setattr(BlockModel, "blocks", blocks)
    return begun


def numbers(folder: Path) -> list[dict[str, Any]]:
    other = ("seconds", "evidence_sha256")
    rows: Any = audit_of(folder)["measurements"]
    return [{name: value for name, value in row.items() if name not in other} for row in rows]


def test_a_killed_subject_goes_on_at_its_block(
    place: Path, scan: Run, qaudit: Run, firsts: list[int]
) -> None:
    killed_in_the_middle(place)
    passes = place / "out" / "evidence" / "passes"
    assert [path.suffix for path in passes.iterdir()] == [".kept"]
    assert scan("series/step10").code == 0
    assert firsts == [1]
    assert not passes.exists()
    assert qaudit("scan", "series/step10", *QUICK[:-1], "whole").code == 0
    assert numbers(place / "out") == numbers(place / "whole")


@pytest.mark.slow
def test_without_checkpoints_nothing_is_kept(place: Path, scan: Run, firsts: list[int]) -> None:
    killed_in_the_middle(place, "--no-checkpoints")
    assert not (place / "out" / "evidence" / "passes").exists()
    assert scan("series/step10").code == 0
    assert firsts == [0]
