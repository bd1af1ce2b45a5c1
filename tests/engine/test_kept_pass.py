"""A pass that was stopped at a block goes on there, with the numbers of one that was not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Scheme, Shipped
from qaudit.engine import block_pass
from qaudit.engine.batches import make_rollout_batches
from qaudit.engine.block_pass import KeptPass, run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.kept_weights import LinearHashes
from qaudit.engine.shipped import open_shipped
from qaudit.engine.streams import Stream
from qaudit.engine.tally import Tally, columns
from qaudit.engine.tokens import Feed
from qaudit.errors import SourceError
from qaudit.model.blocks import BlockModel
from qaudit.types import Corpus, Protocol, RolloutText
from tests.support import released, tiny
from tests.support.filled import filled
from tests.support.passes import CONTEXT, CPU, EVALUATION, feed, on_llama, opened, windows
from tests.support.quantized import quantized_copy

SCHEMES = "rtn-4bit:group=32,gptq-3bit:group=32,awq-4bit:group=32,gptaq-3bit:group=32"

FEW = "rtn-4bit:group=32,gptq-3bit:group=32"


class StoppedError(Exception):
    pass


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pass, "EVERY_SECONDS", 0.0)


@contextmanager
def a_pass(
    checkpoint: Path, spill: Path, limit: int = 10**9
) -> Iterator[tuple[BlockModel, HiddenStates, LinearHashes]]:
    with HiddenStates(spill, limit, CPU) as states, LinearHashes() as hashes:
        yield opened(checkpoint), states, hashes


def go(
    checkpoint: Path,
    spill: Path,
    path: Path,
    *,
    stop_at: int = 99,
    key: str = "k",
    limit: int = 10**9,
    given: Feed | None = None,
    files: Sequence[Scheme] = (),
    texts: str = SCHEMES,
) -> tuple[dict[str, Tally], dict[str, dict[str, str]], list[int]]:
    """Run a pass that is kept at `path`; return its tallies, its hashes and the blocks it ran."""
    ran: list[int] = []

    def progress(done: int, total: int, what: str) -> None:
        ran.append(done)
        if done == stop_at:
            raise StoppedError

    with a_pass(checkpoint, spill, limit) as (model, states, hashes):
        schemes, kept = [*parse_schemes([texts]), *files], KeptPass(path, key, hashes)
        fed = given or feed()
        tallies = run_blocks(model, fed, schemes, states, progress, hashes.observe, kept)
        return dict(tallies), hashes.state(), sorted(set(ran))


def numbers(tallies: dict[str, Tally]) -> dict[str, dict[str, Any]]:
    """Return all that a pass has measured, but for seconds."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor | np.ndarray):
            return value.tolist()
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if isinstance(value, dict):
            return [[plain(key), plain(each)] for key, each in value.items()]
        return sorted(value) if isinstance(value, set) else value

    apart = ("host_seconds", "spans")
    return {
        name: {field: plain(value) for field, value in vars(tally).items() if field not in apart}
        for name, tally in tallies.items()
    }


@pytest.fixture(scope="module")
def whole(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Tally], dict[str, dict[str, str]]]:
    """Return tallies and hashes of a pass that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return go(checkpoint, folder / "spill", folder / "step.kept")[:2]


@pytest.fixture(scope="module")
def stopped(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return what is kept of a pass that was stopped at its last block."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(StoppedError):
        monkeypatch.setattr(block_pass, "EVERY_SECONDS", 0.0)
        go(checkpoint, folder / "spill", folder / "step.kept", stop_at=2)
    return (folder / "step.kept").read_bytes()


def stops_and_goes_on(folder: Path, place: Path, stop_at: int = 1, **fed: Any) -> dict[str, Tally]:
    """Assert that a pass which was stopped at a block equals one that was not; return it."""
    fed["texts"] = FEW
    whole, hashes, _ = go(folder, place / "a", place / "other.kept", **fed)
    with pytest.raises(StoppedError):
        go(folder, place / "b", place / "step.kept", stop_at=stop_at, **fed)
    after, hashes_after, ran = go(folder, place / "c", place / "step.kept", **fed)
    assert ran[0] == stop_at
    assert numbers(after) == numbers(whole)
    assert hashes_after == hashes
    return after


def test_experts_go_on_with_what_was_routed(tmp_path: Path) -> None:
    wide = {"vocab_size": 256, "max_position_embeddings": CONTEXT}
    folder = released.save(tmp_path / "model", "olmoe", **wide)
    after = stops_and_goes_on(folder, tmp_path)
    gptq = next(tally for name, tally in after.items() if name.startswith("gptq"))
    assert {block for block, _ in gptq.expert_tokens} == {block for block, _ in gptq.routing}
    assert {block for block, _ in gptq.routing} == {0, 1}
    assert any("left as they are" in note for note in gptq.notes)  # the routers of all blocks


def test_what_blocks_left_for_later_ones_goes_on(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model", "gemma4_text")

    quantized_copy(folder, tmp_path / "file", "gptq")
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = frozenset(weights.keys())
    file = Shipped(file="file", format="gptq", bits=4, sha256="0" * 64)
    shipped = {file.spec: partial(open_shipped, file, tmp_path / "file", folder, names)}
    items = [replace(window, scored_from=len(window.tokens) - 2) for window in windows(6, 3)]
    given = replace(feed(), items=(items,), reference=lambda _: opened(folder), shipped=shipped)
    after = stops_and_goes_on(folder, tmp_path, 3, given=given, limit=60_000, files=[file])
    assert all(tally.from_reference for name, tally in filled(after.items()) if name != "reference")
    assert after[file.spec].error is None and after[file.spec].nbytes


@on_llama
def test_items_go_on_where_they_were(checkpoint: Path, tmp_path: Path) -> None:
    items = [replace(window, scored_from=len(window.tokens) - 2) for window in windows(6, 3)]
    given = replace(feed(), items=(items[:4], items[4:]))
    after = stops_and_goes_on(checkpoint, tmp_path, given=given)
    assert all(tally.options is not None for tally in filled(after.values()))


@on_llama
def test_rollouts_go_on_where_they_were(checkpoint: Path, tmp_path: Path) -> None:
    written = tuple(replace(window, scored_from=3) for window in windows(4, 4))
    rollouts = RolloutText(
        written,
        prompt=np.arange(4),
        greedy=np.ones(4, dtype=bool),
        ends=(("turn", (2, 17)),),
        sha256="rollouts",
        mark=np.full(4, np.nan),
        read=np.full(4, 3),
        sampler=(0.8, 40, 0.95),
    )
    corpus = Corpus(Protocol(CONTEXT, CONTEXT), (), tuple(EVALUATION), (), rollouts=rollouts)
    given = replace(feed(), evaluation=(*feed().evaluation, *make_rollout_batches(corpus)))
    after = stops_and_goes_on(checkpoint, tmp_path, given=given)
    assert all(columns(tally.rows[-1:], "likeliest_N") for tally in filled(after.values()))


@on_llama
def test_linears_that_were_left_in_earlier_blocks_are_still_named(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "step.kept"
    with a_pass(checkpoint, tmp_path / "a") as (model, states, hashes):
        model.left["model.layers.0.mlp.gate"] = "it routes"
        KeptPass(path, "k", hashes).keep(1, states, [], model)
    with a_pass(checkpoint, tmp_path / "b") as (model, states, hashes):
        assert KeptPass(path, "k", hashes).resume(states, [], model) == 1
        assert model.left == {"model.layers.0.mlp.gate": "it routes"}


@on_llama
def test_a_pass_with_a_file_that_failed_is_kept_no_more(checkpoint: Path, tmp_path: Path) -> None:
    tally = Tally(error=SourceError("cut"))
    stream = Stream()
    stream.name, stream.tally = "file", tally
    with a_pass(checkpoint, tmp_path / "spill") as (model, states, hashes):
        KeptPass(tmp_path / "step.kept", "k", hashes).keep(1, states, [stream], model)
    assert not (tmp_path / "step.kept").exists()


@pytest.mark.parametrize("limit", [10**9, 0])
def test_a_pass_goes_on_at_the_block_and_equals_one_that_was_never_stopped(
    checkpoint: Path, whole: Any, tmp_path: Path, limit: int
) -> None:
    path = tmp_path / "passes" / "step.kept"
    with pytest.raises(StoppedError):
        go(checkpoint, tmp_path / "b", path, stop_at=2, limit=limit)
    after, hashes_after, ran = go(checkpoint, tmp_path / "c", path, limit=limit)
    assert ran == [2, 3]  # the last block, and the head
    assert numbers(after) == numbers(whole[0])
    assert hashes_after == whole[1]
    assert [file.name for file in path.parent.iterdir()] == ["step.kept"]


def test_a_pass_that_was_stopped_in_the_head_only_reads_out(
    checkpoint: Path, whole: Any, tmp_path: Path
) -> None:
    path = tmp_path / "step.kept"
    with pytest.raises(StoppedError):
        go(checkpoint, tmp_path / "b", path, stop_at=3)
    after, _, ran = go(checkpoint, tmp_path / "c", path)
    assert ran == [3]
    assert numbers(after) == numbers(whole[0])


@on_llama
@pytest.mark.parametrize("damage", ["another key", "cut", "flipped", "no header"])
def test_what_was_kept_of_something_else_or_is_damaged_is_as_nothing(
    checkpoint: Path, whole: Any, stopped: bytes, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "step.kept"
    if damage == "cut":
        stopped = stopped[:-100]
    elif damage == "flipped":
        stopped = stopped[:-1000] + bytes([stopped[-1000] ^ 1]) + stopped[-999:]
    elif damage == "no header":
        stopped = b"\x00\n"
    path.write_bytes(stopped)
    key = "other" if damage == "another key" else "k"
    after, _, ran = go(checkpoint, tmp_path / "c", path, key=key)
    assert ran[0] == 0
    assert numbers(after) == numbers(whole[0])


@on_llama
def test_nothing_of_a_damaged_file_waits(checkpoint: Path, stopped: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step.kept"
    path.write_bytes(stopped[:-1])
    with a_pass(checkpoint, tmp_path / "spill") as (model, states, hashes):
        assert KeptPass(path, "k", hashes).resume(states, [], model) == 0
        assert states.listed() == []


@on_llama
def test_a_full_disk_ends_the_keeping_and_not_the_pass(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_pass.os, "fsync", full)
    _, _, ran = go(checkpoint, tmp_path / "b", tmp_path / "passes" / "step.kept")
    assert ran == [0, 1, 2, 3]
    assert list((tmp_path / "passes").iterdir()) == []


@on_llama
def test_nothing_is_written_before_its_time(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_pass, "EVERY_SECONDS", 1e9)
    go(checkpoint, tmp_path / "b", tmp_path / "step.kept")
    assert not (tmp_path / "step.kept").exists()
