"""Adapters merged as PEFT merges them, and adapters that are refused by name."""

import json
import pickle
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from qaudit.checkpoints.adapters import AdaptedWeights, read_adapter
from qaudit.checkpoints.configuration import METADATA
from qaudit.checkpoints.header import DcpFolder
from qaudit.checkpoints.safetensors import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    PICKLE,
    PICKLE_INDEX,
    WeightFolder,
    load_pickles,
)
from qaudit.errors import QauditError, SourceError

SETTINGS = {
    "plain": {},
    "ranks": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5},
              "alpha_pattern": {"v_proj": 3}},
    "rank-stabilized": {"use_rslora": True},
    "dora": {"use_dora": True},
    "whole modules": {"modules_to_save": ["lm_head"]},
    "biases": {"bias": "lora_only"},
}  # fmt: skip
# PEFT calls what transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def write(folder, *, dtype=torch.float32, model="qwen2", **settings):
    """Write a base and an adapter of it whose every weight is drawn; return the base's model."""
    import peft
    from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

    torch.manual_seed(0)
    if model == "gpt2":
        config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
        settings = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, **settings}
    else:
        config = Qwen2Config(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=64, tie_word_embeddings=False,
        )  # fmt: skip
        settings = {"target_modules": TARGETS, **settings}
    base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    base.save_pretrained(folder / "base")
    lora = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    adapted = peft.get_peft_model(base, lora)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    with warnings.catch_warnings(action="ignore"):  # that embeddings are saved, too
        adapted.save_pretrained(folder / "adapter")
    return adapted


def check(folder, changed):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto")
    peft = PeftModel.from_pretrained(model, folder / "adapter").merge_and_unload().state_dict()
    base = WeightFolder(folder / "base")
    weights = AdaptedWeights(base, folder / "adapter")
    assert sum(not torch.equal(base.read(n), weights.read(n)) for n in base.names()) >= changed
    for name in weights.names():
        ours, theirs = weights.read(name), peft[name]
        assert ours.dtype == theirs.dtype
        # Both compute in float32 and round once: at most one unit in the last place apart.
        unit = 1e-6 if ours.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(ours, theirs, rtol=unit, atol=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_those_of_merge_and_unload(tmp_path, name, dtype):
    write(tmp_path, dtype=dtype, **SETTINGS[name])
    check(tmp_path, changed=9)


def test_transposed_linears_and_embeddings_are_those_of_merge_and_unload(tmp_path):
    write(tmp_path / "gpt2", model="gpt2")
    check(tmp_path / "gpt2", changed=6)
    write(tmp_path / "embedding", target_modules=["embed_tokens", "q_proj"])
    check(tmp_path / "embedding", changed=3)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    write(folder)
    return folder


@pytest.fixture
def adapter(written, tmp_path):
    """Return an adapter that may be changed, of the base beside it."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return tmp_path / "adapter"


def test_what_is_not_merged_is_refused_by_name(adapter):
    table = json.loads((adapter / ADAPTER).read_text())
    for keys, words in (
        ({"peft_type": "IA3"}, "`IA3`"),
        ({"alora_invocation_tokens": [1]}, "`alora_invocation_tokens`"),
        ({"r": 0}, "`r` is 0"),
        ({"r": 3}, "asks for [3, "),
        ({"rank_pattern": {"(a+)+": 2}}, "`(a+)+`"),
        ({"rank_pattern": {"(": 2}}, "cannot be read"),
    ):
        (adapter / ADAPTER).write_text(json.dumps({**table, **keys}))
        with pytest.raises(QauditError, match=re.escape(words)):
            AdaptedWeights(WeightFolder(adapter.with_name("base")), adapter)


def test_a_pickled_adapter_is_opened_only_where_that_is_allowed(adapter):
    base = WeightFolder(adapter.with_name("base"))
    whole = AdaptedWeights(base, adapter).read("model.layers.0.self_attn.q_proj.weight")
    torch.save(load_file(adapter / ADAPTER_WEIGHTS[0]), adapter / ADAPTER_WEIGHTS[1])
    (adapter / ADAPTER_WEIGHTS[0]).unlink()
    with pytest.raises(QauditError, match="pickled weights only") as error:
        AdaptedWeights(base, adapter)
    assert "--allow-pickle" in error.value.hint
    opened = AdaptedWeights(base, adapter, allow_pickle=True)
    assert torch.equal(opened.read("model.layers.0.self_attn.q_proj.weight"), whole)


def test_adapters_in_part_or_of_another_base_are_refused(adapter, tmp_path):
    write(tmp_path / "gpt2", model="gpt2")
    with pytest.raises(QauditError, match="its base does not hold"):
        AdaptedWeights(WeightFolder(tmp_path / "gpt2" / "base"), adapter)
    assert read_adapter(adapter).rank == 4
    tensors = load_file(adapter / ADAPTER_WEIGHTS[0])
    (part,) = [name for name in tensors if "layers.0.self_attn.q_proj.lora_A.weight" in name]
    del tensors[part]
    save_file(tensors, adapter / ADAPTER_WEIGHTS[0])
    with pytest.raises(QauditError, match=r"of `model.layers.0.self_attn.q_proj` only"):
        AdaptedWeights(WeightFolder(tmp_path / "base"), adapter)


# --------------------------------------------------------------------------------------------------
# Distributed checkpoints, as torch and FSDP write them, read as torch itself reads them.


def save(folder, state):
    with warnings.catch_warnings(action="ignore"):  # that one process saves
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def drawn(**more):
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
def test_every_tensor_of_the_model_is_that_of_torch(tmp_path, wrap):
    model = drawn()
    save(tmp_path, wrap(model))
    weights = DcpFolder(tmp_path)
    assert set(weights.infos) == set(model)
    for name, tensor in model.items():
        assert weights.infos[name].shape == tuple(tensor.shape)
        assert weights.infos[name].nbytes == tensor.nbytes
        assert torch.equal(weights.read(name), tensor)


def test_a_tensor_in_pieces_of_several_files_is_put_together(tmp_path):
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


class _Evil:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def _outside(metadata):
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path


def _wide(metadata):
    metadata.state_dict_metadata["model.norm.weight"].size = torch.Size([1 << 40])


def test_what_torch_did_not_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path, drawn())
    path = tmp_path / METADATA
    whole = path.read_bytes()
    for damage, words in (
        (pickle.dumps(_Evil()), "it names"),
        (whole[:300], "cannot be read"),
        (_outside, "outside the folder"),
        (_wide, "do not fill"),
    ):
        path.write_bytes(whole if callable(damage) else damage)
        if callable(damage):
            metadata = FileSystemReader(tmp_path).read_metadata()
            damage(metadata)
            path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(SourceError, match=words):
            DcpFolder(tmp_path)
        assert not Path("ran").exists()
    path.write_bytes(whole)
    (tmp_path / "__0_0.distcp").write_bytes(b"0" * 100)
    with pytest.raises(SourceError, match="cannot be read"):
        DcpFolder(tmp_path).read("model.norm.weight")
    save(tmp_path / "titan", {"tok_embeddings.weight": torch.zeros(2, 2)})
    with pytest.raises(SourceError) as error:
        DcpFolder(tmp_path / "titan")
    assert "convert_to_hf.py" in str(error.value.hint)


# --------------------------------------------------------------------------------------------------
# Pickled weights: tensors as they were stored, and nothing else, whatever is in the file.


HALF = torch.arange(6, dtype=torch.float16).reshape(2, 3)
MASK = torch.tril(torch.ones(4, 4, dtype=torch.uint8))


def shards(folder, **files):
    """Write shards and their index, as large checkpoints are published."""
    weight_map = {}
    for k, tensors in enumerate(files.values(), 1):
        name = f"pytorch_model-{k:05}-of-{len(files):05}.bin"
        torch.save(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / PICKLE_INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
def test_halves_and_masks_come_back_as_they_were_stored(tmp_path, zipped):
    stored = {"half": HALF, "attention.bias": MASK, "parameter": nn.Parameter(HALF.float())}
    torch.save(stored, tmp_path / PICKLE, _use_new_zipfile_serialization=zipped)
    weights = WeightFolder(tmp_path, allow_pickle=True)
    for name, tensor in stored.items():
        found = weights.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
        assert not found.requires_grad
        assert weights.shape(name) == tuple(tensor.shape)


def test_shards_are_read_as_one_and_what_is_wrong_in_them_is_named(tmp_path):
    second = r"pytorch_model-00002-of-00002\.bin"
    shards(tmp_path, a={"x": HALF}, b={"y": torch.tensor([1.0, float("nan")])})
    weights = WeightFolder(tmp_path, allow_pickle=True)
    assert list(weights.names()) == ["x", "y"] and torch.equal(weights.read("x"), HALF)
    with pytest.raises(SourceError, match=f"`y` in `{second}` holds NaN"):
        weights.read("y")
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(SourceError, match=f"`{second}`") as caught:
        WeightFolder(tmp_path, allow_pickle=True)
    assert caught.value.hint == "download the missing shard"
    for name in ("a.bin", "b.bin"):
        torch.save({"x": HALF}, tmp_path / name)
    with pytest.raises(SourceError, match=r"`x` is in both `a\.bin` and `b\.bin`"):
        load_pickles(tmp_path, ["a.bin", "b.bin"])


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
@pytest.mark.parametrize("names", [("a.bin", "b.bin"), ("b.bin", "a.bin")])
def test_a_command_in_a_shard_is_not_run_and_its_file_named(tmp_path, zipped, names, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": HALF}, names[0])
    torch.save({"y": _Evil()}, names[1], _use_new_zipfile_serialization=zipped)
    with pytest.raises(SourceError, match="cannot be read as pickled tensors") as caught:
        load_pickles(tmp_path, ["a.bin", "b.bin"])
    assert names[1] in caught.value.message
    assert not Path("ran").exists()
    assert b"touch" in Path(names[1]).read_bytes()


def test_anything_but_a_table_of_tensors_is_refused(tmp_path):
    for stored in (
        {"model": {"x": HALF}}, {"step": 3}, HALF, [HALF],
        b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"<html>not found</html>", pickle.dumps([1, 2]),
    ):  # fmt: skip
        torch.save(stored, tmp_path / PICKLE)
        if isinstance(stored, bytes):
            (tmp_path / PICKLE).write_bytes(stored)
        with pytest.raises(SourceError, match="cannot be read as pickled tensors"):
            WeightFolder(tmp_path, allow_pickle=True)
