"""Pickled weights: tensors as they were stored, and nothing else, whatever is in the file."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from qaudit.checkpoints.safetensors import PICKLE, PICKLE_INDEX, WeightFolder, load_pickles
from qaudit.errors import SourceError

HALF = torch.arange(6, dtype=torch.float16).reshape(2, 3)
MASK = torch.tril(torch.ones(4, 4, dtype=torch.uint8))


def shards(folder: Path, **files: dict[str, torch.Tensor]) -> None:
    """Write shards and their index, as large checkpoints are published."""
    weight_map = {}
    for k, tensors in enumerate(files.values(), 1):
        name = f"pytorch_model-{k:05}-of-{len(files):05}.bin"
        torch.save(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / PICKLE_INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
def test_halves_and_masks_of_bytes_come_back_as_they_were_stored(
    tmp_path: Path, zipped: bool
) -> None:
    stored = {"half": HALF, "attention.bias": MASK, "parameter": nn.Parameter(HALF.float())}
    torch.save(stored, tmp_path / PICKLE, _use_new_zipfile_serialization=zipped)
    weights = WeightFolder(tmp_path, allow_pickle=True)
    for name, tensor in stored.items():
        found = weights.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
        assert not found.requires_grad
        assert weights.shape(name) == tuple(tensor.shape)


def test_shards_are_read_as_one_checkpoint(tmp_path: Path) -> None:
    shards(tmp_path, a={"x": HALF}, b={"y": MASK})
    weights = WeightFolder(tmp_path, allow_pickle=True)
    assert list(weights.names()) == ["x", "y"]
    assert torch.equal(weights.read("y"), MASK)


def test_a_value_that_is_not_finite_is_named_with_its_shard(tmp_path: Path) -> None:
    shards(tmp_path, a={"x": HALF}, b={"y": torch.tensor([1.0, float("nan")])})
    with pytest.raises(SourceError, match=r"`y` in `pytorch_model-00002-of-00002\.bin` holds NaN"):
        WeightFolder(tmp_path, allow_pickle=True).read("y")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shards(tmp_path, a={"x": HALF}, b={"y": MASK})
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(SourceError, match=r"`pytorch_model-00002-of-00002\.bin`") as caught:
        WeightFolder(tmp_path, allow_pickle=True)
    assert caught.value.hint == "download the missing shard"


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    torch.save({"x": HALF}, tmp_path / "a.bin")
    torch.save({"x": HALF}, tmp_path / "b.bin")
    with pytest.raises(SourceError, match=r"`x` is in both `a\.bin` and `b\.bin`"):
        load_pickles(tmp_path, ["a.bin", "b.bin"])


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_command_in_any_shard_is_not_run_and_its_file_is_named(
    tmp_path: Path, zipped: bool, shard: int
) -> None:
    mark = tmp_path / "mark"
    names = ["a.bin", "b.bin"]
    torch.save({"x": HALF}, tmp_path / names[1 - shard])
    torch.save({"y": Command(mark)}, tmp_path / names[shard], _use_new_zipfile_serialization=zipped)
    with pytest.raises(SourceError, match="cannot be read as pickled tensors") as caught:
        load_pickles(tmp_path, names)
    assert names[shard] in caught.value.message
    assert not mark.exists()
    with (tmp_path / names[shard]).open("rb") as file:  # the same bytes, opened by Python itself
        raw = file.read()
    assert b"system" in raw


def test_a_plain_pickle_of_a_command_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / PICKLE).write_bytes(pickle.dumps({"x": Command(mark)}))
    with pytest.raises(SourceError, match="cannot be read as pickled tensors"):
        WeightFolder(tmp_path, allow_pickle=True)
    assert not mark.exists()
    pickle.loads((tmp_path / PICKLE).read_bytes())  # it would have run
    assert mark.exists()


@pytest.mark.parametrize(
    "raw",
    [b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"<html>not found</html>", pickle.dumps([1, 2])],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / PICKLE).write_bytes(raw)
    with pytest.raises(SourceError, match="cannot be read as pickled tensors"):
        WeightFolder(tmp_path, allow_pickle=True)


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.99])
def test_a_file_cut_short_is_refused(tmp_path: Path, cut: float) -> None:
    torch.save({"x": torch.randn(64, 64)}, tmp_path / PICKLE)
    raw = (tmp_path / PICKLE).read_bytes()
    (tmp_path / PICKLE).write_bytes(raw[: int(cut * len(raw))])
    with pytest.raises(SourceError, match="cannot be read as pickled tensors"):
        WeightFolder(tmp_path, allow_pickle=True)


@pytest.mark.parametrize("stored", [{"model": {"x": HALF}}, {"step": 3}, HALF, [HALF]])
def test_anything_but_a_table_of_tensors_is_refused(tmp_path: Path, stored: object) -> None:
    torch.save(stored, tmp_path / PICKLE)
    with pytest.raises(SourceError, match="cannot be read as pickled tensors"):
        WeightFolder(tmp_path, allow_pickle=True)
