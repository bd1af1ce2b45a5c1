"""Distributed checkpoints, as torch and FSDP write them, read as torch itself reads them."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from qaudit.checkpoints.dcp import FSDP_FOLDER, METADATA, DcpFolder, dcp_folder
from qaudit.errors import SourceError


def save(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings(action="ignore"):  # that one process saves
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def drawn(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(64, 16).bfloat16(),
        "model.norm.weight": torch.randn(16),
        "model.mask": torch.arange(6).reshape(2, 3),
        **more,
    }


@pytest.mark.parametrize(
    "wrap", [lambda m: m, lambda m: {"model": m, "step": torch.tensor(3), "x": {"a": 5}}]
)
def test_every_tensor_of_the_model_is_that_of_torch(tmp_path: Path, wrap: Any) -> None:
    model = drawn()
    save(tmp_path, wrap(model))
    weights = DcpFolder(tmp_path)
    assert set(weights.infos) == set(model)
    for name, tensor in model.items():
        assert weights.infos[name].shape == tuple(tensor.shape)
        assert weights.infos[name].nbytes == tensor.nbytes
        assert torch.equal(weights.read(name), tensor)


def test_a_tensor_in_pieces_of_several_files_is_put_together(tmp_path: Path) -> None:
    """Two processes save a half each, and the metadata of both becomes one, as FSDP leaves it."""
    whole = torch.randn(8, 4)
    for rank, rows in enumerate((slice(0, 5), slice(5, 8))):
        save(tmp_path / str(rank), {"w": whole[rows].clone()})
    metadata = FileSystemReader(tmp_path / "0").read_metadata()
    second = FileSystemReader(tmp_path / "1").read_metadata()
    tensor, piece = metadata.state_dict_metadata["w"], second.state_dict_metadata["w"].chunks[0]
    tensor.size, piece.offsets = torch.Size([8, 4]), torch.Size([5, 0])
    tensor.chunks.append(piece)
    ((index, place),) = second.storage_data.items()
    place.relative_path = "__1_0.distcp"
    metadata.storage_data[type(index)("w", torch.Size([5, 0]), 1)] = place
    (tmp_path / "1" / "__0_0.distcp").rename(tmp_path / "0" / "__1_0.distcp")
    (tmp_path / "0" / METADATA).write_bytes(pickle.dumps(metadata))
    into = {"w": torch.empty(8, 4)}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(into, checkpoint_id=tmp_path / "0", no_dist=True)  # torch reads it, too
    assert torch.equal(into["w"], whole)
    assert torch.equal(DcpFolder(tmp_path / "0").read("w"), whole)


def test_the_folder_of_fsdp_beside_the_optimizer_is_found(tmp_path: Path) -> None:
    assert dcp_folder(tmp_path) is None
    save(tmp_path / FSDP_FOLDER, {"model": drawn()})
    assert dcp_folder(tmp_path) == tmp_path / FSDP_FOLDER
    assert dcp_folder(tmp_path / FSDP_FOLDER) == tmp_path / FSDP_FOLDER


class _Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def _outside(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path


def _wide(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.norm.weight"].size = torch.Size([1 << 40])


BROKEN: dict[str, tuple[Any, str]] = {
    "a program": (lambda path: path.write_bytes(pickle.dumps(_Evil())), "it names"),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:300]), "cannot be read"),
    "outside its folder": (_outside, "outside the folder"),
    "a shape that nothing fills": (_wide, "do not fill"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_metadata_that_torch_did_not_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    damage, words = BROKEN[name]
    save(tmp_path, drawn())
    path = tmp_path / METADATA
    if damage in (_outside, _wide):
        metadata = FileSystemReader(tmp_path).read_metadata()
        damage(metadata)
        path.write_bytes(pickle.dumps(metadata))
    else:
        damage(path)
    with pytest.raises(SourceError, match=words):
        DcpFolder(tmp_path)
    assert not Path("ran").exists()


def test_a_damaged_piece_and_names_of_torchtitan_are_refused(tmp_path: Path) -> None:
    save(tmp_path, drawn())
    (tmp_path / "__0_0.distcp").write_bytes(b"0" * 100)
    with pytest.raises(SourceError, match="cannot be read"):
        DcpFolder(tmp_path).read("model.norm.weight")
    save(tmp_path / "titan", {"tok_embeddings.weight": torch.zeros(2, 2)})
    with pytest.raises(SourceError) as error:
        DcpFolder(tmp_path / "titan")
    assert "convert_to_hf.py" in str(error.value.hint)
