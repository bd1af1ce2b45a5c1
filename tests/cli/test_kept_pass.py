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
from qaudit.text.rollouts import Rollout
from qaudit.text.tokenizer import tokenizer_sha256
from tests.support import released, toys
from tests.support.cli import QUICK, Run, audit_of
from tests.support.rollouts import written

# Keeps its pass at every block, says so at the entrance of the second, and waits to be killed.
STOPS = """
import time
import qaudit.engine.block_pass
from qaudit.cli import main
from qaudit.cli.progress import Progress

qaudit.engine.block_pass.EVERY_SECONDS = 0.0

def block(self, done, total, what):
    if done == 1:
        print("in the middle", flush=True)
        time.sleep(600)

Progress.block = block
main()
"""


def killed_in_the_middle(place: Path, *arguments: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPS, "scan", *QUICK, *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in the middle\n", process.communicate()[1]
    process.send_signal(signal.SIGKILL)
    process.communicate()


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
    audit: Any = audit_of(folder)
    rows = audit["measurements"] + audit["tasks"]
    rows += [
        each for name in ("rollouts", "routing") for each in audit["diagnostics"].get(name, ())
    ]
    return [{name: value for name, value in row.items() if name not in other} for row in rows]


def goes_on(place: Path, qaudit: Run, firsts: list[int], *arguments: str) -> None:
    """Assert that a scan which was killed goes on at its block, and equals one that was not."""
    killed_in_the_middle(place, *arguments)
    passes = place / "out" / "evidence" / "passes"
    assert [path.suffix for path in passes.iterdir()] == [".kept"]
    done = qaudit("scan", *QUICK, *arguments)
    assert done.code == 0, done.err
    assert firsts[0] == 1
    assert not passes.exists()
    assert qaudit("scan", *QUICK[:-1], "whole", *arguments).code == 0
    assert numbers(place / "out") == numbers(place / "whole")


@pytest.mark.slow
def test_a_killed_subject_goes_on_at_its_block(place: Path, qaudit: Run, firsts: list[int]) -> None:
    goes_on(place, qaudit, firsts, "series/step10")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # lm-eval's own
def test_experts_tasks_and_rollouts_go_on_with_their_subject(
    place: Path, qaudit: Run, firsts: list[int]
) -> None:
    model = released.save(place / "model", "olmoe", max_position_embeddings=1024)
    toys.tokenizer(adds_bos=False).save_pretrained(model)
    toys.write(place / "data", ("anatomy",), documents=6)
    samples = [
        Rollout(prompt=k, prompt_sha256=f"{k}", ids=(1, 2, 3), new_ids=(4 + k, 5, 6), greedy=True)
        for k in range(4)
    ]
    written(place / "rolls", samples, tokenizer_sha256=tokenizer_sha256([model]))
    items = ("--tasks", "arc_easy,piqa", "--set", "task_data=data", "--set", "task_items=4")
    goes_on(place, qaudit, firsts, "model", *items, "--set", "rollouts=rolls")
    assert len(numbers(place / "out")) > 2 + 4  # two streams, two tasks of each, and the rest
