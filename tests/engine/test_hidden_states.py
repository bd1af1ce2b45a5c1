import errno

import pytest
import torch

from qaudit.engine.hidden_states import HiddenStates
from qaudit.errors import MachineError
from qaudit.model.links import beside, leave
from tests.support.pretended_device import pretended

CPU = torch.device("cpu")


@pytest.mark.parametrize("limit", [0, 3_000, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_put_comes_back_from_memory_and_from_disk(tmp_path, limit, dtype):
    stored = {(stream, k): torch.randn(2, 8 + k, 16).to(dtype) for stream in "ab" for k in range(3)}
    with HiddenStates(tmp_path, limit, CPU) as streams:
        for _ in range(2):  # the second round overwrites the first
            stored = {key: tensor + 1 for key, tensor in stored.items()}
            for (stream, k), tensor in stored.items():
                streams.put(stream, k, tensor)
        for (stream, k), tensor in stored.items():
            assert torch.equal(streams.get(stream, k), tensor)
        assert (streams.nbytes_spilled > 0) == (limit < 10**9)
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


@pytest.mark.parametrize("limit", [0, 10**9])
def test_a_renamed_stream_takes_the_place_of_the_other(tmp_path, limit):
    with HiddenStates(tmp_path, limit, CPU) as streams:
        for round_ in range(3):
            streams.put("new", 0, torch.full((1, 4, 4), float(round_)))
            streams.rename("new", "old")
            assert streams.get("old", 0).unique().item() == round_
        streams.put("another", 0, torch.zeros(1, 4, 4))
        assert streams.get("old", 0).unique().item() == 2


@pytest.mark.parametrize("limit", [0, 10**9])
def test_what_a_batch_no_longer_has_beside_it_is_dropped(tmp_path, limit):
    with HiddenStates(tmp_path, limit, CPU) as streams:
        tensors = {name: torch.ones(1, 4) for name in ("keys", "values")}
        streams.put("a", 0, leave(torch.zeros(1, 4, 4), tensors))
        streams.put("a", 0, leave(torch.zeros(1, 4, 4), {"keys": torch.zeros(1, 4)}))
        assert {name: t.sum() for name, t in beside(streams.get("a", 0)).items()} == {"keys": 0}
        streams.put("a", 0, torch.zeros(1, 4, 4))
        assert not beside(streams.get("a", 0))
        assert [name for name, *_ in streams.listed()] == ["a"]


def test_renaming_nothing_drops_the_other(tmp_path):
    with HiddenStates(tmp_path, 0, CPU) as streams:
        streams.put("old", 0, torch.zeros(1, 4, 4))
        streams.rename("new", "old")
        assert not list(tmp_path.iterdir())


def test_a_stream_leaves_a_full_gpu_for_the_host_and_then_for_the_disk(tmp_path):
    with (
        pretended(),
        HiddenStates(tmp_path, 1024, torch.device("cuda"), device_limit_nbytes=2048) as streams,
    ):
        for k, nbytes_spilled in enumerate((0, 0, 0, 1024)):  # two fit there, one on the host
            streams.put("a", k, torch.full((1, 16, 16), float(k), device="cuda"))
            assert streams.nbytes_spilled == nbytes_spilled
        for k in range(4):
            batch = streams.get("a", k)
            assert (batch.device.type, batch.unique().item()) == ("cuda", k)


def test_a_full_disk_is_a_sentence_and_not_a_traceback(tmp_path, monkeypatch):
    class FullFile:
        def seek(self, offset):
            return offset

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    with HiddenStates(tmp_path, 0, CPU) as streams:
        streams.put("a", 0, torch.zeros(1, 2, 2))
        streams._files["a"]._file.close()
        monkeypatch.setattr(streams._files["a"], "_file", FullFile())
        with pytest.raises(MachineError, match="no space left on device") as caught:
            streams.put("a", 1, torch.zeros(1, 2, 2))
    assert "stream_memory=" in caught.value.hint
