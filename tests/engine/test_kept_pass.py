"""A pass that was stopped at a block goes on there, with the numbers of one that was not."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open

from qaudit.core.linears import FoldSource, Linears, Quantized
from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.core.scheme import Shipped
from qaudit.engine import block_pass
from qaudit.engine.batches import make_rollout_batches
from qaudit.engine.block_pass import KeptPass, run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.kept_weights import LinearHashes, sha256_of
from qaudit.engine.shipped import open_shipped
from qaudit.engine.streams import Stream
from qaudit.engine.tally import Tally, columns
from qaudit.errors import SourceError
from qaudit.types import Corpus, Protocol, RolloutText
from tests.support import released, tiny
from tests.support.filled import filled
from tests.support.passes import CONTEXT, CPU, EVALUATION, feed, on_llama, opened, windows
from tests.support.quantized import quantized_copy

FEW = "rtn-4bit:group=32,gptq-3bit:group=32"
SCHEMES = f"{FEW},awq-4bit:group=32,gptaq-3bit:group=32"


class StoppedError(Exception):
    pass


@pytest.fixture(autouse=True, scope="module")
def _at_every_block():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_pass, "EVERY_SECONDS", 0.0)
        yield


@contextmanager
def a_pass(checkpoint, spill, limit=10**9):
    with HiddenStates(spill, limit, CPU) as states, LinearHashes() as hashes:
        yield opened(checkpoint), states, hashes


def go(checkpoint, spill, path, stop_at=99, limit=10**9, given=None, files=(), texts=SCHEMES):
    """Run a pass that is kept at `path`; return its tallies, its hashes and the blocks it ran."""
    ran = []

    def progress(block, total, what):
        ran.append(block)
        if block == stop_at:
            raise StoppedError

    with a_pass(checkpoint, spill, limit) as (model, states, hashes):
        schemes, kept = [*parse_schemes([texts]), *files], KeptPass(path, "k", hashes)
        fed = given or feed()
        tallies = run_blocks(model, fed, schemes, states, progress, hashes.observe, kept)
        return dict(tallies), hashes.state(), sorted(set(ran))


def numbers(tallies):
    """Return all that a pass has measured, but for seconds."""

    def plain(value):
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


def never_stopped(place, folder, **fed):
    return go(folder, place / "spill", place / "other.kept", **fed)


@pytest.fixture
def whole(checkpoint, once):
    return once(never_stopped, checkpoint)


def stopped_at_the_last_block(place, checkpoint):
    """Return what is kept of a pass."""
    with pytest.raises(StoppedError):
        go(checkpoint, place / "spill", place / "step.kept", stop_at=2)
    return (place / "step.kept").read_bytes()


@pytest.fixture
def stopped(checkpoint, once):
    return once(stopped_at_the_last_block, checkpoint)


def stops_and_goes_on(folder, place, stop_at=1, whole=None, **fed):
    """Assert that a pass which was stopped at a block equals one that was not; return it."""
    expected, hashes, _ = whole or never_stopped(place / "a", folder, **fed)
    path = place / "passes" / "step.kept"
    with pytest.raises(StoppedError):
        go(folder, place / "b", path, stop_at=stop_at, **fed)
    after, hashes_after, ran = go(folder, place / "c", path, **fed)
    assert (ran[0], numbers(after), hashes_after) == (stop_at, numbers(expected), hashes)
    assert [file.name for file in path.parent.iterdir()] == ["step.kept"]
    return after


@on_llama
@pytest.mark.parametrize(("stop_at", "limit"), [(2, 10**9), (2, 0), (3, 10**9)])
def test_a_pass_goes_on_at_the_block_or_the_head(checkpoint, whole, tmp_path, stop_at, limit):
    stops_and_goes_on(checkpoint, tmp_path, stop_at, whole, limit=limit)


def test_experts_go_on_with_what_was_routed(tmp_path, once):
    wide = {"vocab_size": 256, "max_position_embeddings": CONTEXT}
    folder = once(released.save, "olmoe", **wide)
    after = stops_and_goes_on(folder, tmp_path, texts=FEW)
    gptq = next(tally for name, tally in after.items() if name.startswith("gptq"))
    assert {block for block, _ in gptq.expert_tokens} == {block for block, _ in gptq.routing}
    assert {block for block, _ in gptq.routing} == {0, 1}
    assert any("left as they are" in note for note in gptq.notes)  # the routers of all blocks


def test_what_blocks_left_for_later_ones_goes_on(tmp_path, once):
    folder = once(tiny.make, "gemma4_text")
    quantized_copy(folder, tmp_path / "file", "gptq")
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = frozenset(weights.keys())
    file = Shipped(file="file", format="gptq", bits=4, sha256="0" * 64)
    shipped = {file.spec: partial(open_shipped, file, tmp_path / "file", folder, names)}
    items = [replace(window, scored_from=len(window.tokens) - 2) for window in windows(6, 3)]
    given = replace(feed(), items=(items,), reference=lambda _: opened(folder), shipped=shipped)
    fed = {"given": given, "limit": 60_000, "files": [file], "texts": FEW}
    after = stops_and_goes_on(folder, tmp_path, 3, **fed)
    assert all(tally.from_reference for name, tally in filled(after.items()) if name != "reference")
    assert after[file.spec].error is None and after[file.spec].nbytes


@on_llama
def test_items_and_rollouts_go_on_where_they_were(checkpoint, tmp_path):
    items = [replace(window, scored_from=len(window.tokens) - 2) for window in windows(6, 3)]
    rollouts = RolloutText(
        tuple(replace(window, scored_from=3) for window in windows(4, 4)),
        prompt=np.arange(4),
        greedy=np.ones(4, dtype=bool),
        ends=(("turn", (2, 17)),),
        sha256="rollouts",
        mark=np.full(4, np.nan),
        read=np.full(4, 3),
        sampler=(0.8, 40, 0.95),
    )
    corpus = Corpus(Protocol(CONTEXT, CONTEXT), (), tuple(EVALUATION), (), rollouts=rollouts)
    evaluation = (*feed().evaluation, *make_rollout_batches(corpus))
    given = replace(feed(), items=(items[:4], items[4:]), evaluation=evaluation)
    for tally in filled(stops_and_goes_on(checkpoint, tmp_path, given=given, texts=FEW).values()):
        assert tally.options is not None
        assert columns(tally.rows[-1:], "likeliest_N")


@on_llama
def test_what_was_left_is_still_named_and_failed_files_end_keeping(checkpoint, tmp_path):
    path, stream = tmp_path / "step.kept", Stream()
    with a_pass(checkpoint, tmp_path / "a") as (model, states, hashes):
        model.left["model.layers.0.mlp.gate"] = "it routes"
        KeptPass(path, "k", hashes).keep(1, states, [], model)
        stream.name, stream.tally = "file", Tally(error=SourceError("cut"))
        KeptPass(tmp_path / "failed.kept", "k", hashes).keep(1, states, [stream], model)
    assert not (tmp_path / "failed.kept").exists()
    with a_pass(checkpoint, tmp_path / "b") as (model, states, hashes):
        assert KeptPass(path, "k", hashes).resume(states, [], model) == 1
        assert model.left == {"model.layers.0.mlp.gate": "it routes"}


@on_llama
def test_what_was_kept_of_something_else_or_is_damaged_is_as_nothing(checkpoint, stopped, tmp_path):
    path = tmp_path / "step.kept"
    flipped = stopped[:-1000] + bytes([stopped[-1000] ^ 1]) + stopped[-999:]
    for key, kept in (
        ("other", stopped), ("k", stopped[:-1]), ("k", flipped), ("k", b"\x00\n")
    ):  # fmt: skip
        path.write_bytes(kept)
        with a_pass(checkpoint, tmp_path / "spill") as (model, states, hashes):
            assert KeptPass(path, key, hashes).resume(states, [], model) == 0
            assert states.listed() == [] and hashes.state() == {}


@on_llama
def test_damage_or_a_full_disk_ends_keeping(checkpoint, whole, stopped, tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    path = tmp_path / "passes" / "step.kept"
    path.parent.mkdir()
    path.write_bytes(stopped[:-100])
    monkeypatch.setattr(block_pass.os, "fsync", full)
    after, hashes, ran = go(checkpoint, tmp_path / "spill", path)
    assert (ran, numbers(after), hashes) == ([0, 1, 2, 3], numbers(whole[0]), whole[1])
    assert [file.name for file in path.parent.iterdir()] == ["step.kept"]  # nothing half written
    path.unlink()
    monkeypatch.setattr(block_pass, "EVERY_SECONDS", 1e9)
    go(checkpoint, tmp_path / "spill", path, texts=FEW)  # nothing is written before its time
    assert not path.exists()


# ---------------------------------------------------------------- hashes that are kept with it

RTN, AWQ = parse_scheme("rtn-4bit"), parse_scheme("awq-4bit:exact_fold=true")
WEIGHT_RC = torch.arange(12.0).reshape(3, 4)


def test_each_linear_of_each_block_has_its_hash_and_scales_are_hashed_as_a_file_holds_them():
    with LinearHashes() as hashes:
        for block in (0, 1):
            linears = Linears({"w": WEIGHT_RC}, block=block)
            hashes.observe(RTN, linears, Quantized({"w": WEIGHT_RC + block}, 0))
    expected = {f"{block}.w": sha256_of(WEIGHT_RC + block) for block in (0, 1)}
    assert (hashes.of(RTN.spec), hashes.of(AWQ.spec)) == (expected, {})
    scale_C, out_RC = torch.tensor([2.0, 0.5, 4.0]), torch.ones(2, 3)
    source = FoldSource("v", is_norm=False, offset=0)
    with LinearHashes() as hashes:
        hashes.observe(AWQ, Linears({}), Quantized({"v": WEIGHT_RC}, 0))
        behind = Linears({}, fold_C=torch.arange(3), fold_source=source)
        hashes.observe(AWQ, behind, Quantized({"o": out_RC}, 0, column_scale_C=scale_C))
    divided, times = sha256_of(WEIGHT_RC / scale_C[:, None]), sha256_of(out_RC * scale_C)
    assert hashes.of(AWQ.spec) == {"0.v": divided, "0.o": times}
