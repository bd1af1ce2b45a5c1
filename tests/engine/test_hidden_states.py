"""Hidden states in memory, on a GPU and on disk; copies beside what a GPU computes.

Copies have the CPU's numbers, and wrong ones without any one wait.
"""

import errno
import linecache
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import qaudit
from qaudit.core.registry import parse_schemes
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.kept_weights import LinearHashes
from qaudit.errors import MachineError, QauditError
from qaudit.model.device import _UNDER_WAY, Copies, HostCopy
from qaudit.model.links import beside, leave
from tests.support import passes
from tests.support.pretended_device import pretended

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IN_MEMORY, IN_FILES = 10**9, 0


@pytest.mark.parametrize("limit", [IN_FILES, 3_000, IN_MEMORY])
def test_what_is_put_comes_back_from_memory_and_from_disk(tmp_path, limit):
    dtypes = {"a": torch.float32, "b": torch.bfloat16}
    stored = {
        (name, k): torch.randn(2, 8 + k, 16, dtype=dtypes[name]) for name in "ab" for k in range(3)
    }
    with HiddenStates(tmp_path, limit, CPU) as streams:
        for _ in range(2):  # the second round overwrites the first
            stored = {key: tensor + 1 for key, tensor in stored.items()}
            for (stream, k), tensor in stored.items():
                streams.put(stream, k, tensor)
        for (stream, k), tensor in stored.items():
            assert torch.equal(streams.get(stream, k), tensor)
        assert (streams.nbytes_spilled > 0) == (limit < IN_MEMORY)
    assert not list(tmp_path.iterdir())


def test_what_is_in_memory_is_added_up_as_it_comes_and_goes(tmp_path, monkeypatch):
    counted = []
    taken = HiddenStates._taken
    monkeypatch.setattr(HiddenStates, "_taken", lambda *what: counted.append(what) or taken(*what))
    with HiddenStates(tmp_path, 64 * 100, CPU) as streams:
        shared = torch.zeros(16)
        for batch in range(200):
            streams.put("a", batch, shared if batch < 100 else torch.zeros(16))
        assert streams.nbytes_spilled == 64
        streams.rename("a", "b")
        streams.drop("b")
        streams.put("c", 0, torch.zeros(16 * 100))
        assert streams.nbytes_spilled == 64
    assert len(counted) < 4 * 200


@pytest.mark.parametrize("limit", [IN_FILES, IN_MEMORY])
def test_what_is_renamed_or_put_again_takes_the_place_of_what_was_there(tmp_path, limit):
    with HiddenStates(tmp_path, limit, CPU) as streams:
        for round_ in range(3):
            streams.put("new", 0, torch.full((1, 4, 4), float(round_)))
            streams.rename("new", "old")
            assert streams.get("old", 0).unique().item() == round_
        streams.put("another", 0, torch.zeros(1, 4, 4))
        assert streams.get("old", 0).unique().item() == 2
        for name in ("nothing", "another"):
            streams.rename("nothing", name)  # drops it
        streams.rename("nothing", "old")
        assert not streams.listed() and not list(tmp_path.iterdir())
        tensors = {name: torch.ones(1, 4) for name in ("keys", "values")}
        streams.put("a", 0, leave(torch.zeros(1, 4, 4), tensors))
        streams.put("a", 0, leave(torch.zeros(1, 4, 4), {"keys": torch.zeros(1, 4)}))
        assert {name: t.sum() for name, t in beside(streams.get("a", 0)).items()} == {"keys": 0}
        streams.put("a", 0, torch.zeros(1, 4, 4))
        assert not beside(streams.get("a", 0))
        assert [name for name, *_ in streams.listed()] == ["a"]


def test_a_full_disk_is_a_sentence_and_not_a_traceback(tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with HiddenStates(tmp_path, IN_FILES, CPU) as streams:
        streams.put("a", 0, torch.zeros(1, 2, 2))
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(MachineError, match="no space left on device") as caught:
            streams.put("a", 1, torch.zeros(1, 2, 2))
    assert "stream_memory=" in caught.value.hint


# ---------------------------------------------------------------- on a GPU, and beside it


def test_a_stream_leaves_a_full_gpu_for_the_host_and_then_for_the_disk(tmp_path):
    with pretended(), HiddenStates(tmp_path, 1024, CUDA, device_limit_nbytes=2048) as streams:
        for k, nbytes_spilled in enumerate((0, 0, 0, 1024)):  # two fit there, one on the host
            streams.put("a", k, torch.full((1, 16, 16), float(k), device="cuda"))
            assert streams.nbytes_spilled == nbytes_spilled
        for k in range(4):
            batch = streams.get("a", k)
            assert (batch.device.type, batch.unique().item()) == ("cuda", k)
    with pretended(), HiddenStates(tmp_path, IN_MEMORY, CUDA, 5000) as states:
        states.put("a", 0, torch.zeros(1000, device="cuda"))
        assert states.nbytes_inside == 1000  # what waits in a block has what states leave
    with pretended(), HiddenStates(tmp_path, 3000, CUDA) as states:
        for k in range(2):  # pinned: 1,200 bytes, which take 2,048
            states.put("a", k, torch.zeros(300, device="cuda"))
        assert states.nbytes_spilled == 1200


def test_a_batch_is_on_its_way_while_another_is_computed(tmp_path):
    with pretended() as device:
        copies = Copies(CUDA)
        batches = [copies.to_host(torch.full((8,), float(k), device="cuda")) for k in range(3)]
        sums = [copies.to_device(batch).sum() for batch in batches]
        assert not device.waits
        assert [total.item() for total in sums] == [0, 8, 16]
    with pretended(), HiddenStates(tmp_path, IN_FILES, CUDA) as states:
        for k in range(3):  # what is still written can be read and replaced
            states.put("a", 0, torch.full((8,), float(k), device="cuda"))
            assert states.get("a", 0).tolist() == [k] * 8
        states.put("a", 1, torch.zeros(8, device="cuda"))
        states.rename("a", "b")
        assert states.get("b", 1).tolist() == [0] * 8
        states.drop("b")
        assert not list(tmp_path.iterdir())


def test_few_copies_are_under_way_at_once():
    nbytes = 4000
    with pretended() as device:
        copies = Copies(CUDA)
        for _ in range(20):
            copies.to_host(torch.ones(nbytes // 4, device="cuda"))
        assert device.reserved <= (_UNDER_WAY + 1) * nbytes
    with pretended() as device:
        copies, kept = Copies(CUDA), HostCopy(torch.ones(nbytes // 4))
        for _ in range(20):
            copies.to_device(kept).add_(1)
        assert device.reserved <= (_UNDER_WAY + 2) * nbytes


class AtOnce(ThreadPoolExecutor):
    """Threads that have done what they were given before anything else happens."""

    def submit(self, function, *args):
        future = super().submit(function, *args)
        wait([future])
        return future


def numbers(place, folder, spill, limit):
    """Return the losses and hashes of a pass whose hidden states wait elsewhere."""
    with LinearHashes() as hashes:
        model = passes.opened(folder, device=place)
        read, _ = passes.run(model, "rtn-4bit", spill, limit, observe=hashes.observe)
    return read, [hashes.of(scheme.spec) for scheme in parse_schemes(["rtn-4bit"])]


def are_equal(read, expected):
    same = all(np.array_equal(read[0][name], expected[0][name]) for name in expected[0])
    return same and read[1] == expected[1]


def source(site):
    path, _, line = site[1].partition(":")
    return linecache.getline(str(Path(qaudit.__file__).parent / path), int(line))


def without(site, folder, spill, limit):
    """Return the numbers of a pass in which a line that orders streams does nothing."""
    with pretended() as device:
        device.left_out = site
        try:
            return numbers(CUDA, folder, spill, limit), device.ordering
        except QauditError as error:  # what is not finite is refused
            return error, device.ordering


def test_each_line_that_orders_streams_is_needed(once, tmp_path, monkeypatch):
    for module in ("model.blocks", "engine.kept_weights"):  # which reads, and which hashes
        monkeypatch.setattr(f"qaudit.{module}.ThreadPoolExecutor", AtOnce)
    folder, seen = once(passes.save, "llama"), set()
    expected = numbers(CPU, folder, tmp_path, IN_MEMORY)
    for limit in (IN_MEMORY, IN_FILES):
        read, sites = without(None, folder, tmp_path, limit)
        assert are_equal(read, expected)
        assert {name for name, _ in sites} == {"record", "wait_event", "record_stream"}
        for site in sorted(sites - seen):
            if "_wait_for_the_oldest" in source(site):  # for memory alone: see above
                continue
            if (
                limit == IN_FILES and site[0] == "record_stream"
            ):  # what goes to a file is waited for
                continue
            read, _ = without(site, folder, tmp_path, limit)
            assert isinstance(read, Exception) or not are_equal(read, expected), site
        seen |= sites
