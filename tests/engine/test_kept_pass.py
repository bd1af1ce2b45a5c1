"""A pass that was stopped at a block goes on there, with the numbers of one that was not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_schemes
from qaudit.engine import kept_pass
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.kept_pass import KeptPass
from qaudit.engine.linear_hashes import LinearHashes
from qaudit.engine.tally import Tally
from qaudit.model.blocks import BlockModel
from tests.support.passes import CPU, feed

SCHEMES = "rtn-4bit:group=32,gptq-3bit:group=32,awq-4bit:group=32,gptaq-3bit:group=32"


class StoppedError(Exception):
    pass


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_pass, "EVERY_SECONDS", 0.0)


@contextmanager
def a_pass(
    checkpoint: Path, spill: Path, limit: int = 10**9
) -> Iterator[tuple[BlockModel, HiddenStates, LinearHashes]]:
    model = BlockModel(checkpoint, WeightFolder(checkpoint), dtype=torch.float32, device=CPU)
    with HiddenStates(spill, limit, CPU) as states, LinearHashes() as hashes:
        yield model, states, hashes


def go(
    checkpoint: Path,
    spill: Path,
    path: Path,
    *,
    stop_at: int = 99,
    key: str = "k",
    limit: int = 10**9,
) -> tuple[dict[str, Tally], dict[str, dict[str, str]], list[int]]:
    """Run a pass that is kept at `path`; return its tallies, its hashes and the blocks it ran."""
    ran: list[int] = []

    def progress(done: int, total: int, what: str) -> None:
        ran.append(done)
        if done == stop_at:
            raise StoppedError

    with a_pass(checkpoint, spill, limit) as (model, states, hashes):

        def observe(scheme: Any, linears: Any, quantized: Any) -> None:
            hashes.observe(scheme, linears, quantized)

        fed = replace(feed(), kept=KeptPass(path, key, hashes))
        tallies = run_blocks(model, fed, parse_schemes([SCHEMES]), states, progress, observe)
        return dict(tallies), hashes.kept(), sorted(set(ran))


def numbers(tallies: dict[str, Tally]) -> dict[str, tuple[Any, ...]]:
    return {
        name: (
            [row.tolist() for row in (*tally.nll, *tally.kl, *tally.same_top)],
            tally.bits,
            tally.weights,
            sorted(tally.linears),
            tally.notes,
        )
        for name, tally in tallies.items()
    }


@pytest.mark.parametrize("limit", [10**9, 0])
def test_a_pass_goes_on_at_the_block_and_equals_one_that_was_never_stopped(
    checkpoint: Path, tmp_path: Path, limit: int
) -> None:
    path = tmp_path / "passes" / "step.kept"
    whole, hashes, _ = go(checkpoint, tmp_path / "a", tmp_path / "other.kept")
    with pytest.raises(StoppedError):
        go(checkpoint, tmp_path / "b", path, stop_at=2, limit=limit)
    after, hashes_after, ran = go(checkpoint, tmp_path / "c", path, limit=limit)
    assert ran == [2, 3]  # the last block, and the head
    assert numbers(after) == numbers(whole)
    assert hashes_after == hashes
    assert [file.name for file in path.parent.iterdir()] == ["step.kept"]


def test_a_pass_that_was_stopped_in_the_head_only_reads_out(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "step.kept"
    with pytest.raises(StoppedError):
        go(checkpoint, tmp_path / "b", path, stop_at=3)
    after, _, ran = go(checkpoint, tmp_path / "c", path)
    assert ran == [3]
    assert numbers(after) == numbers(go(checkpoint, tmp_path / "d", tmp_path / "e")[0])


@pytest.mark.parametrize("damage", ["another key", "cut", "flipped", "no header"])
def test_what_was_kept_of_something_else_or_is_damaged_is_as_nothing(
    checkpoint: Path, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "step.kept"
    with pytest.raises(StoppedError):
        go(checkpoint, tmp_path / "b", path, stop_at=2)
    raw = path.read_bytes()
    if damage == "cut":
        path.write_bytes(raw[:-100])
    elif damage == "flipped":
        path.write_bytes(raw[:-1000] + bytes([raw[-1000] ^ 1]) + raw[-999:])
    elif damage == "no header":
        path.write_bytes(b"\x00\n")
    key = "other" if damage == "another key" else "k"
    after, _, ran = go(checkpoint, tmp_path / "c", path, key=key)
    assert ran[0] == 0
    assert numbers(after) == numbers(go(checkpoint, tmp_path / "d", tmp_path / "e")[0])


def test_a_full_disk_ends_the_keeping_and_not_the_pass(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_pass.os, "fsync", full)
    _, _, ran = go(checkpoint, tmp_path / "b", tmp_path / "passes" / "step.kept")
    assert ran == [0, 1, 2, 3]
    assert list((tmp_path / "passes").iterdir()) == []


def test_nothing_is_written_before_its_time(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_pass, "EVERY_SECONDS", 1e9)
    go(checkpoint, tmp_path / "b", tmp_path / "step.kept")
    assert not (tmp_path / "step.kept").exists()
