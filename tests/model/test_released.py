"""Logits of every family that runs in blocks, and files of other tensors than parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_merge
from qaudit.errors import ModelError, SourceError
from qaudit.model import skeleton
from qaudit.model.blocks import BlockModel
from qaudit.model.proven import STREAMABLE
from qaudit.model.routes import MergedWeights, Weights
from qaudit.planning.sizes import Sizes
from tests.support import passes, released, tiny

TOKENS = torch.arange(3, 51).reshape(2, 24)


def opened(folder: Path, weights: Weights | None = None) -> BlockModel:
    weights = weights or WeightFolder(folder)
    return BlockModel(folder, weights, dtype=torch.float32, device=torch.device("cpu"))


@torch.no_grad()
def logits(model: BlockModel) -> torch.Tensor:
    hidden = model.embed(TOKENS)
    for block in model.blocks():
        hidden = block.forward(hidden)
    return model.logits(hidden)


@torch.no_grad()
def plain_logits(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = released.plain(folder, family, dtype)
    result: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return result


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    stored = {**load_file(path), **tensors}
    kept = {name: t for name, t in stored.items() if t is not None}
    save_file(kept, path, metadata={"format": "pt"})


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@BOTH
@pytest.mark.parametrize("family", sorted(released.RELEASED))
def test_logits_are_those_of_the_library(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    released.save(tmp_path, family)
    assert Sizes.read(tmp_path).blocks == 2  # Apertus has tensors of no dimension
    assert torch.equal(
        logits(passes.opened(tmp_path, dtype)), plain_logits(tmp_path, family, dtype)
    )


@BOTH
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_logits_of_batches_of_two_shapes_are_those_of_the_library(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tiny.make(tmp_path, family)
    model = passes.opened(folder, dtype)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    batches = [tiny.tokens(2, 48), tiny.tokens(1, 37, seed=1)]
    hidden = [model.embed(tokens_BT) for tokens_BT in batches]
    with torch.no_grad():
        for block in model.blocks():
            hidden = [block.forward(hidden_BTD) for hidden_BTD in hidden]
        for tokens_BT, hidden_BTD in zip(batches, hidden, strict=True):
            ours, theirs = model.logits(hidden_BTD), whole(tokens_BT, use_cache=False).logits
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_every_family_called_streamable_is_tested() -> None:
    assert set(tiny.FAMILIES) | set(released.RELEASED) == STREAMABLE


def test_a_soup_is_joined_of_merged_tensors(tmp_path: Path) -> None:
    folders = [released.save(tmp_path / str(seed), "olmo_hybrid", seed) for seed in (0, 1)]
    mean = {
        name: (tensor.double() + load_file(folders[1] / "model.safetensors")[name].double()) / 2
        for name, tensor in load_file(folders[0] / "model.safetensors").items()
    }
    soup = tmp_path / "soup"
    released.save(soup, "olmo_hybrid")
    change(soup, **{name: tensor.float() for name, tensor in mean.items()})
    members = [WeightFolder(folder) for folder in folders]
    merged = MergedWeights(["a", "b"], members, [0.5, 0.5], parse_merge("mean"))
    assert torch.equal(logits(opened(folders[0], merged)), plain_logits(soup, "olmo_hybrid"))


def test_a_vision_tower_is_not_read_and_noted(tmp_path: Path) -> None:
    released.save(tmp_path, "gemma3")
    read: list[str] = []

    class Watched(WeightFolder):
        def read(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().read(name)

    model = opened(tmp_path, Watched(tmp_path))
    logits(model)
    assert read and not any("vision" in name or "projector" in name for name in read)
    assert "text never enters them" in model.notes[0]


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    released.save(tmp_path, "olmo_hybrid")
    name = "model.layers.0.linear_attn.q_conv1d.weight"
    assert name in load_file(tmp_path / "model.safetensors")
    change(tmp_path, **{name: None})
    with pytest.raises(SourceError, match=r"model\.layers\.0\.linear_attn"):
        opened(tmp_path)


def test_blocks_that_predict_further_tokens_are_not_read_and_noted(tmp_path: Path) -> None:
    released.save(tmp_path, "apertus")
    change(tmp_path, **{"mtp.layers.0.norm.weight": torch.ones(32)})
    (note,) = opened(tmp_path).notes
    assert "`mtp.layers.0.norm.weight`" in note


def test_a_buffer_that_nothing_computes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released.save(tmp_path, "falcon_h1")
    models_around = skeleton.models_around
    monkeypatch.setattr(skeleton, "models_around", lambda model, n: models_around(model, n)[-1:])
    with pytest.raises(ModelError, match=r"nothing computes .*mup_vector"):
        logits(opened(tmp_path))
