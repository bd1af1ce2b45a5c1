"""Linears of experts under names of their own, where a release stores them in one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.errors import ModelError
from qaudit.model.skeleton import Skeleton, build_skeleton
from qaudit.model.stored_names import Unfused, skeleton_of_names
from tests.support import released
from tests.support.models import save_model


def unfused(folder: Path) -> Unfused:
    weights = WeightFolder(folder)
    return Unfused(build_skeleton(folder, weights, torch.float32), weights)


def test_experts_in_one_tensor_are_read_one_by_one_and_joined_again(tmp_path: Path) -> None:
    folder = released.save(tmp_path, "llama4_text")
    apart = unfused(folder)
    name = apart.stored_name(1, "feed_forward.experts.3.up_proj.weight")
    assert name == "model.layers.1.feed_forward.experts.3.up_proj.weight"
    both_EHR = WeightFolder(folder).read("model.layers.1.feed_forward.experts.gate_up_proj")
    assert torch.equal(apart.read(name), both_EHR[3, :, 64:].T)
    assert apart.shape(name) == (64, 32)
    tensors = {name: apart.read(name).contiguous() for name in apart.names()}
    before = {n: WeightFolder(folder).read(n) for n in WeightFolder(folder).names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    skeleton = build_skeleton(folder, WeightFolder(folder), torch.float32)
    after = skeleton.read(WeightFolder(folder), list(before), torch.device("cpu"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_names_are_those_that_the_library_joins(tmp_path: Path) -> None:
    folder = released.save(tmp_path, "qwen3_moe")
    weights = WeightFolder(folder)
    one_by_one = [name for name in weights.names() if ".experts." in name]
    weights_of = {name: weights.read(name) for name in one_by_one}
    skeleton = build_skeleton(folder, weights, torch.float32)
    model = skeleton.read(weights, list(skeleton.routes), torch.device("cpu"))
    save_file({n: t.contiguous() for n, t in model.items()}, folder / "model.safetensors")
    apart = unfused(folder)
    assert sorted(name for name in apart.names() if ".experts." in name) == sorted(one_by_one)
    assert all(torch.equal(apart.read(name), weights_of[name]) for name in one_by_one)


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3"])
def test_what_is_stored_one_by_one_keeps_its_names(family: str, tmp_path: Path) -> None:
    apart = unfused(released.save(tmp_path, family))
    assert list(apart.names()) == list(WeightFolder(tmp_path).names())


def test_experts_without_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no runtime has names for the quantized linears"):
        unfused(released.save(tmp_path, "gpt_oss"))


def test_checkpoints_of_one_shape_share_the_skeleton_of_names(tmp_path: Path) -> None:
    def skeleton(folder: Path) -> Skeleton:
        return skeleton_of_names(folder, WeightFolder(folder))

    first, second = (save_model(tmp_path / f"step{seed}", seed) for seed in (1, 2))
    wider = save_model(tmp_path / "wider", 1, intermediate_size=96)
    shared = skeleton(first)
    assert skeleton(second) is shared
    assert skeleton(wider) is not shared
    config = second / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'))
    assert skeleton(second) is not skeleton(first)
