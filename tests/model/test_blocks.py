"""Blocks one at a time: what is loaded, what is refused, what is resident, what is installed.

Errors of configurations name the file, and nothing of it chooses what is loaded.
"""

import json
import shutil
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qaudit.checkpoints.safetensors import SINGLE, WeightFolder
from qaudit.core.linears import Quantized
from qaudit.errors import ModelError, SourceError
from qaudit.model.blocks import BlockModel, self_check
from qaudit.model.front import must_be_causal
from qaudit.model.links import Arguments, Tape
from qaudit.model.skeleton import build_skeleton, load_whole, must_be_causal_type
from qaudit.text.tokenizer import load_tokenizer
from tests.support import tiny

CPU = torch.device("cpu")


def open_model(folder, dtype=torch.float32):
    return BlockModel(folder, WeightFolder(folder), dtype=dtype, device=CPU)


@torch.no_grad()
def stream(model, tokens_BT):
    hidden_BTD = model.embed(tokens_BT)
    for block in model.blocks():
        hidden_BTD = block.forward(hidden_BTD)
    return hidden_BTD


@pytest.fixture
def first_block(once):
    """Return a function: the first block of a family's model, and what enters it."""
    walks = []

    @torch.no_grad()
    def first(family, batch=1):
        model = open_model(once(tiny.make, family))
        hidden_BTD = model.embed(tiny.tokens(batch, 10))
        walks.append(model.blocks())  # held: a walk that is dropped gives its block back
        return next(walks[-1]), hidden_BTD

    return first


def edit(folder, add=None, drop=()):
    tensors = safetensors.torch.load_file(folder / SINGLE)
    tensors = {k: v for k, v in tensors.items() if k not in drop} | (add or {})
    safetensors.torch.save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


# --------------------------------------------------------------------------- how it is stored


EMBEDDING = "model.embed_tokens.weight"
OLD_BUFFERS = {
    "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8),
    "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
    "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.full((4,), 7.0),
}


def stored_in(dtype):
    def change(folder):
        tensors = safetensors.torch.load_file(folder / SINGLE)
        edit(folder, add={name: tensor.to(dtype) for name, tensor in tensors.items()})

    return change


def with_head(folder, times=1.0, drop=()):
    """Store a head although it is tied."""
    embedding = safetensors.torch.load_file(folder / SINGLE)[EMBEDDING]
    edit(folder, add={"lm_head.weight": embedding * times}, drop=drop)


@pytest.mark.parametrize(
    ("family", "config", "change"),
    [
        *((family, {"tie_word_embeddings": True}, lambda _: None)
          for family in ("llama", "olmo2", "gpt_neox")),
        *((family, {"tie_word_embeddings": False}, lambda _: None) for family in ("gpt2", "gemma")),
        ("olmo2", {"shard": "100KB"}, lambda _: None),
        ("gpt_neox", {"shard": "100KB"}, lambda _: None),
        ("olmo", {"tie_word_embeddings": True}, with_head),
        ("olmo", {"tie_word_embeddings": True}, lambda folder: with_head(folder, 2.0)),
        ("llama", {"tie_word_embeddings": True}, lambda f: with_head(f, drop=[EMBEDDING])),
        ("gpt_neox", {}, lambda folder: edit(folder, add=OLD_BUFFERS)),
        ("olmo2", {}, stored_in(torch.bfloat16)), ("olmo2", {}, stored_in(torch.float16)),
    ],
)  # fmt: skip
@torch.no_grad()
def test_what_is_stored_is_loaded_as_the_library_loads_it(family, config, change, tmp_path):
    change(tiny.make(tmp_path, family, **config))
    tokens_BT = tiny.tokens(2, 20)
    for dtype in (torch.float32, torch.bfloat16):
        whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        expected, model = whole(input_ids=tokens_BT).logits, open_model(tmp_path, dtype)
        assert torch.equal(model.logits(stream(model, tokens_BT)), expected)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 or "shard" not in config


# -------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("made", "config", "add", "drop", "said"),
    [
        ({}, {"num_hidden_layers": 2}, {}, "", r"no place for `model\.layers\.2\..* and \d more"),
        ({"tie_word_embeddings": True}, {}, {}, "model.embed_tokens.weight",
         r"no tensor for .*`model\.embed_tokens\.weight`"),
        ({}, {}, {"model.layers.0.mlp.up_proj.weight": torch.zeros(128, 60)}, "",
         r"up_proj\.weight` in `.*model\.safetensors` is \[128, 60\].*\[128, 64\]"),
        ({}, {"model_type": "no-such-model"}, {}, "", r"config\.json` does not describe a known"),
        ({}, None, {}, "", r"no `config\.json`"),
        *(({}, text, {}, "", r"config\.json` (does not describe a known|cannot be)")
          for text in ("{", "[]", "{}")),
    ],
)  # fmt: skip
def test_a_config_and_weights_that_do_not_fit_are_refused(made, config, add, drop, said, tmp_path):
    edit(tiny.make(tmp_path, "llama", **made), add=add, drop=[drop])
    if isinstance(config, dict):
        configure(tmp_path, **config)
    elif config is None:
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(SourceError, match=said):
        open_model(tmp_path)


@pytest.mark.parametrize("kind", ["int16", "float8_e4m3fn"])
def test_weights_that_are_codes_without_a_scale_are_refused(kind, tmp_path):
    folder = tiny.make(tmp_path, "qwen3")
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = safetensors.torch.load_file(folder / SINGLE)[name]
    edit(folder, add={name: tensor.to(getattr(torch, kind))})
    model = open_model(folder)
    with pytest.raises(SourceError, match=rf"`{name}` is stored as `{kind}`"):
        stream(model, tiny.tokens(1, 4))
    with pytest.raises(SourceError, match=f"is stored as `{kind}`"):
        load_whole(folder, WeightFolder(folder), torch.float32)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
        {"model_type": "vit", "num_hidden_layers": 1},
    ],
    ids=str,
)
def test_a_model_that_is_no_decoder_is_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"(decoder|causal) language model") as info:
        open_model(tmp_path)
    assert "decoder" in info.value.hint or "next token" in info.value.hint


def test_blocks_that_see_the_future_are_refused(tmp_path, monkeypatch):
    # `bert` is refused by its configuration; others do not tell.
    monkeypatch.setattr("qaudit.model.skeleton.must_be_causal_type", lambda *_: None)
    monkeypatch.setitem(tiny.FAMILIES, "bert", tiny.FAMILIES["llama"])
    tiny.make(tmp_path, "bert")
    with pytest.raises(ModelError, match="sees tokens after it"):
        stream(open_model(tmp_path), tiny.tokens(1, 8))


def test_what_changes_states_between_blocks_and_looks_ahead_behind_a_norm_are_refused():
    tape, hidden_BTD = Tape(2), torch.zeros(1, 2, 4)
    tape.pass_on(0, hidden_BTD, Arguments())
    with pytest.raises(ModelError, match="changes the hidden states before block 1"):
        tape.pass_on(1, hidden_BTD + 1, Arguments())

    class Ahead(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(16, elementwise_affine=False)

        def forward(self, hidden_BTD):
            return hidden_BTD + self.norm(hidden_BTD).mean(1, keepdim=True)

    hidden_BTD = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ModelError, match="in block 3 a token sees tokens after it"):
        must_be_causal(3, Ahead(), Arguments(), hidden_BTD)


# ---------------------------------------------------------------- configurations of others


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float31"}, {"quantization_config": True}, {"num_attention_heads": 0},
        {"rope_theta": None}, {"rope_parameters": {"rope_type": "none"}}, {"architectures": [1]},
        {"max_position_embeddings": -5}, {"num_hidden_layers": 1_000_000}, {"vocab_size": 2**39},
        {"num_hidden_layers": 9_000}, {"hidden_act": "no"}, {"hidden_act": []},
        {"rms_norm_eps": "x"},
        {"pad_token_id": 10**9}, {"head_dim": 3}, {"layer_types": "x"}, {"id2label": 5},
        {"tie_word_embeddings": []}, {"torch_dtype": {}}, {"attention_bias": "no"},
    ],
    ids=str,
)  # fmt: skip
def test_a_mutated_configuration_is_run_or_refused(changes, once, tmp_path):
    folder = shutil.copytree(once(tiny.make, "llama"), tmp_path / "mutated")
    configure(folder, **changes)
    for build in (build_skeleton, load_whole):
        try:
            build(folder, WeightFolder(folder), torch.float32)
        except SourceError as error:
            assert str(folder) in error.message or "layers" in error.message
            assert error.hint


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_configuration_does_not_choose_the_attention(key, once, tmp_path, monkeypatch):
    folder, names = shutil.copytree(once(tiny.make, "llama"), tmp_path / "model"), []
    imports = SimpleNamespace(find_spec=lambda name, *_: names.append(name))  # and finds nothing
    expected = build_skeleton(folder, WeightFolder(folder), torch.float32).model.config
    monkeypatch.setattr(sys, "meta_path", [imports, *sys.meta_path])
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a request was made"))
    for name in ("someone/kernel", "kernels-community/flash-attn2", "flash_attention_2", "eager"):
        configure(folder, **{key: name, "experts_implementation": name, "use_kernels": True})
        built = build_skeleton(folder, WeightFolder(folder), torch.float32).model
        for model in (built, load_whole(folder, WeightFolder(folder), torch.float32)):
            assert model.config._attn_implementation == expected._attn_implementation
        assert not {name.partition(".")[0] for name in names} & {"kernels", "flash_attn"}


WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
TOKENIZER = {"version": "1.0", "added_tokens": [], "model": WORDS}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"), ("tokenizer.json", "[]"), ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", json.dumps(TOKENIZER | {"version": "9.9"})),
        ("tokenizer.json", json.dumps(TOKENIZER | {"model": {"type": "Newer", "vocab": {}}})),
        ("tokenizer.json", json.dumps(TOKENIZER | {"normalizer": {"type": "Newer"}})),
        ("tokenizer_config.json", '{"tokenizer_class": 1}'), ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
        ("tokenizer_config.json", '{"model_max_length": "long"}'),
    ],
)  # fmt: skip
def test_a_mutated_tokenizer_is_refused_by_its_folder(name, text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    usual = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (tmp_path / "tokenizer_config.json").write_text(usual)
    load_tokenizer(tmp_path)
    (tmp_path / name).write_text(text)
    try:
        load_tokenizer(tmp_path)
    except SourceError as error:
        assert str(tmp_path) in error.message


@pytest.mark.parametrize(
    ("model_type", "changes", "refused"),
    [
        *((name, {}, True) for name in ("bert", "xlm", "xlnet", "cpmant")),
        ("bert", {"is_decoder": True}, False), ("xlm", {"causal": True}, False),
        ("gpt_neox", {}, False), ("llama", {}, False),
    ],
)  # fmt: skip
def test_models_that_read_behind_a_token_are_refused(model_type, changes, refused, tmp_path):
    match = r"reads what is (behind a token|before an answer)"
    with pytest.raises(ModelError, match=match) if refused else nullcontext():
        must_be_causal_type(AutoConfig.for_model(model_type, **changes), tmp_path)


# ------------------------------------------------------------------------------- residency


def test_at_most_two_blocks_are_resident_and_a_walk_can_be_left(tmp_path, monkeypatch):
    model = open_model(tiny.make(tmp_path, "olmo2", num_hidden_layers=6))
    names, read = [], WeightFolder.read
    monkeypatch.setattr(WeightFolder, "read", lambda *of: names.append(of[1]) or read(*of))
    for block in model.blocks():
        time.sleep(0.02)  # a reader that ran further ahead would have been there by now
        blocks = {int(name.split(".")[2]) for name in names if ".layers." in name}
        assert max(blocks) <= block.index + 1
        loaded = [not all(p.is_meta for p in module.parameters()) for module in model._blocks]
        assert [index for index, is_loaded in enumerate(loaded) if is_loaded] == [block.index]
    assert all(p.is_meta for module in model._blocks for p in module.parameters())
    first = stream(model, tokens_BT := tiny.tokens(1, 12))
    for _ in model.blocks():  # can be walked again, and left early
        break
    assert torch.equal(stream(model, tokens_BT), first)


def test_a_shape_that_was_never_embedded_is_refused(once):
    model = open_model(once(tiny.make, "llama"))
    model.embed(tiny.tokens(2, 12))
    blocks = model.blocks()  # held: a walk that is dropped gives its block back
    block = next(blocks)
    assert block.forward(torch.randn(2, 12, 64)).shape == (2, 12, 64)
    with pytest.raises(ModelError, match="never embedded"):
        block.forward(torch.randn(3, 12, 64))
    model.front.forget()
    with pytest.raises(ModelError, match="never embedded"):
        block.forward(torch.randn(2, 12, 64))


# ------------------------------------------------------------------------------ quantization


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen2"])  # all but llama have biases
@torch.no_grad()
def test_installed_weights_and_forwards_are_used_and_taken_back(family, first_block):
    block, hidden_BTD = first_block(family)
    before = block.forward(hidden_BTD)
    kept = {n: block.weight(n).clone() for group in block.groups for n in group.linears}

    def installed(weight=1.0, forward=None):
        forwards = {n: lambda x, w=w: forward * (x @ w.T) for n, w in kept.items()}
        given = {} if forward is None else forwards
        block.install(Quantized({n: weight * w for n, w in kept.items()}, 0, forwards=given))
        return block.forward(hidden_BTD)

    assert not torch.equal(installed(0.5), before)
    for name, weight in kept.items():
        assert torch.equal(block.weight(name), weight)  # what schemes see stays as it was
    assert torch.equal(installed(), before)
    # A forward replaces the matrix and not the bias: the same product in another order of
    # additions, fp32 rounding of 64 and 128 terms.
    assert torch.allclose(installed(forward=1.0), before, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(installed(forward=0.0), before, atol=1e-3)
    block.restore()
    assert torch.equal(block.forward(hidden_BTD), before)


@torch.no_grad()
def test_what_is_installed_while_a_batch_waits_at_a_linear_is_what_it_meets(first_block):
    block, hidden_BTD = first_block("llama")
    name = block.groups[0].linears[0]
    weight_RC = block.weight(name)
    forward = mock.Mock(side_effect=lambda x: x @ weight_RC.T)
    changed = Quantized({}, 0, forwards={name: forward})
    linear = block.module.get_submodule(name)
    handle = linear.register_forward_pre_hook(lambda *_: block.install(changed))
    block.forward(hidden_BTD)
    handle.remove()
    assert forward.call_count == 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "phi"])  # phi: q, k, v and fc1
@torch.no_grad()
def test_linears_of_a_group_read_one_changed_input(family, first_block):
    block, hidden_BTD = first_block(family, 2)
    before = block.forward(hidden_BTD)
    double = mock.Mock(side_effect=lambda x: 2 * x)
    for group in block.groups:
        weights = {name: block.weight(name).clone() / 2 for name in group.linears}
        block.install(Quantized(weights, 0, inputs=double))
    assert torch.equal(block.forward(hidden_BTD), before)  # twos are exact
    assert double.call_count == len(block.groups)
    with block.as_it_was([name for group in block.groups for name in group.linears]):
        assert torch.equal(block.forward(hidden_BTD), before)
    assert double.call_count == len(block.groups)
    assert torch.equal(block.forward(hidden_BTD), before)
    first = block.groups[0]
    block.install(Quantized({n: block.weight(n).clone() for n in first.linears}, 0))
    double.reset_mock()
    assert torch.equal(block.forward(hidden_BTD), before)
    assert double.call_count == len(block.groups) - 1  # a new one has its own
    block.restore()
    assert torch.equal(block.forward(hidden_BTD), before)
    assert double.call_count == len(block.groups) - 1


# ------------------------------------------------------------------------------- self-check


def checked(folder, dtype, device):
    weights = WeightFolder(folder)
    model = BlockModel(folder, weights, dtype=dtype, device=device)
    return self_check(model, load_whole(folder, weights, dtype))


def test_the_self_check_notices_a_stream_that_differs(once, monkeypatch):
    for family in ("olmo2", "gpt_neox", "gemma2"):
        assert checked(once(tiny.make, family), torch.bfloat16, CPU) == 0
    embed = BlockModel.embed
    monkeypatch.setattr(BlockModel, "embed", lambda self, tokens: embed(self, tokens) * 1.01)
    assert checked(once(tiny.make, "olmo2"), torch.float32, CPU) > 1e-6


# ------------------------------------------------------------------------------------ device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_stream_on_a_gpu_is_the_whole_model_on_a_gpu(dtype, tmp_path):
    folder = tiny.make(tmp_path, "olmo2", num_hidden_layers=6)
    # The head is a product of another shape, hence another kernel.
    assert checked(folder, dtype, torch.device("cuda")) < 1e-2
