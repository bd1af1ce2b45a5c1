"""Logits of every family that runs in blocks, and files of other tensors than parameters.

Linears of experts have names of their own, where a release stores them in one tensor.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_merge
from qaudit.errors import ModelError, SourceError
from qaudit.model import skeleton
from qaudit.model.blocks import BlockModel
from qaudit.model.proven import BRANCHING, STREAMABLE, reads_trees
from qaudit.model.routes import MergedWeights
from qaudit.model.skeleton import build_skeleton
from qaudit.model.stored_names import Unfused, skeleton_of_names
from tests.support import passes, released, tiny
from tests.support.models import save_model
from tests.support.tiny import header_sizes

CPU = torch.device("cpu")
BATCHES = [tiny.tokens(2, 48), tiny.tokens(1, 37, seed=1)]
EVERY = [
    *((tiny.make, family) for family in sorted(tiny.FAMILIES)),
    *((released.save, family) for family in sorted(released.RELEASED)),
]


@torch.no_grad()
def logits(model, batches=BATCHES):
    hidden = [model.embed(tokens_BT) for tokens_BT in batches]
    for block in model.blocks():
        hidden = [block.forward(hidden_BTD) for hidden_BTD in hidden]
    return [model.logits(hidden_BTD) for hidden_BTD in hidden]


@torch.no_grad()
def must_be_plain(model, folder, family, dtype=torch.float32):
    whole = released.plain(folder, family, dtype)
    for tokens_BT, ours in zip(BATCHES, logits(model), strict=True):
        theirs = whole(input_ids=tokens_BT, use_cache=False).logits
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def change(folder, **tensors):
    path = folder / "model.safetensors"
    kept = {name: t for name, t in {**load_file(path), **tensors}.items() if t is not None}
    save_file(kept, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("make", "family"), EVERY)
def test_logits_of_batches_of_two_shapes_are_those_of_the_library(make, family, once):
    folder = once(make, family)
    for dtype in (torch.float32, torch.bfloat16):
        must_be_plain(passes.opened(folder, dtype), folder, family, dtype)
    # What sees a part of its text or has no positions reads no trees; `mistral` is read in part.
    branches = family in BRANCHING - {"mistral"}
    assert passes.opened(folder).takes_branches(80) is branches
    assert reads_trees(read_configuration(folder)) is branches


def test_every_family_called_streamable_is_tested():
    assert {family for _, family in EVERY} == STREAMABLE


def test_a_soup_is_joined_of_merged_tensors(once, tmp_path):
    members = [WeightFolder(once(released.save, "olmo_hybrid", seed)) for seed in (0, 1)]
    a, b = members
    mean = {name: (a.read(name).double() + b.read(name)).float() / 2 for name in a.names()}
    soup = change(released.save(tmp_path, "olmo_hybrid"), **mean)
    merged = MergedWeights(
        ["a", "b"], members, partial(parse_merge("mean").merge, weights=[0.5, 0.5])
    )
    model = BlockModel(soup, merged, dtype=torch.float32, device=CPU)
    must_be_plain(model, soup, "olmo_hybrid")


def test_a_vision_tower_is_not_read_and_noted(once, monkeypatch):
    names, read = [], WeightFolder.read
    monkeypatch.setattr(WeightFolder, "read", lambda *of: names.append(of[1]) or read(*of))
    model = passes.opened(once(released.save, "gemma3"))
    logits(model)
    assert names and not any("vision" in name or "projector" in name for name in names)
    assert "text never enters them" in model.notes[0]


def test_a_tensor_that_is_missing_is_named_and_blocks_of_further_tokens_are_noted(tmp_path):
    folder = released.save(tmp_path / "missing", "olmo_hybrid")
    name = "model.layers.0.linear_attn.q_conv1d.weight"
    assert name in load_file(folder / "model.safetensors")
    with pytest.raises(SourceError, match=r"model\.layers\.0\.linear_attn"):
        passes.opened(change(folder, **{name: None}))
    folder = released.save(tmp_path / "further", "apertus")
    assert header_sizes(folder).blocks == 2  # Apertus has tensors of no dimension
    further = change(folder, **{"mtp.layers.0.norm.weight": torch.ones(32)})
    (note,) = passes.opened(further).notes
    assert "`mtp.layers.0.norm.weight`" in note


def test_a_buffer_that_nothing_computes_is_refused(once, monkeypatch):
    around = skeleton.models_around
    monkeypatch.setattr(skeleton, "models_around", lambda model, n: around(model, n)[-1:])
    with pytest.raises(ModelError, match=r"nothing computes .*mup_vector"):
        logits(passes.opened(once(released.save, "falcon_h1")))


# ---------------------------------------------------------------- experts in one tensor


def unfused(folder):
    weights = WeightFolder(folder)
    return Unfused(build_skeleton(folder, weights, torch.float32), weights)


def read_all(weights):
    return {name: weights.read(name).contiguous() for name in weights.names()}


def test_experts_in_one_tensor_are_read_one_by_one_and_joined_again(tmp_path):
    folder = released.save(tmp_path, "llama4_text")
    apart, before = unfused(folder), read_all(WeightFolder(folder))
    name = apart.stored_name(1, "feed_forward.experts.3.up_proj.weight")
    assert name == "model.layers.1.feed_forward.experts.3.up_proj.weight"
    both_EHR = before["model.layers.1.feed_forward.experts.gate_up_proj"]
    assert torch.equal(apart.read(name), both_EHR[3, :, 64:].T)
    assert apart.shape(name) == (64, 32)
    save_file(read_all(apart), folder / "model.safetensors", metadata={"format": "pt"})
    weights = WeightFolder(folder)
    after = build_skeleton(folder, weights, torch.float32).read(weights, list(before), CPU)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_names_are_those_that_the_library_joins(tmp_path):
    folder = released.save(tmp_path, "qwen3_moe")
    weights = WeightFolder(folder)
    one_by_one = {name: t for name, t in read_all(weights).items() if ".experts." in name}
    built = build_skeleton(folder, weights, torch.float32)
    model = built.read(weights, list(built.routes), CPU)
    save_file({n: t.contiguous() for n, t in model.items()}, folder / "model.safetensors")
    apart = unfused(folder)
    assert {name for name in apart.names() if ".experts." in name} == one_by_one.keys()
    assert all(torch.equal(apart.read(name), tensor) for name, tensor in one_by_one.items())


def test_what_is_stored_one_by_one_keeps_its_names_and_experts_without_names_are_refused(once):
    for family in ("deepseek_v3", "gemma3"):
        folder = once(released.save, family)
        assert list(unfused(folder).names()) == list(WeightFolder(folder).names())
    with pytest.raises(ModelError, match="no runtime has names for the quantized linears"):
        unfused(once(released.save, "gpt_oss"))


def test_checkpoints_of_one_shape_share_the_skeleton_of_names(tmp_path):
    def names(folder):
        return skeleton_of_names(folder, WeightFolder(folder))

    first, second = (save_model(tmp_path / f"step{seed}", seed) for seed in (1, 2))
    wider = save_model(tmp_path / "wider", 1, intermediate_size=96)
    shared = names(first)
    assert names(second) is shared
    assert names(wider) is not shared
    config = second / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'))
    assert names(second) is not names(first)
