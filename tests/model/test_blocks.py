"""Blocks one at a time: what is loaded, what is refused, what is resident, what is installed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qaudit.checkpoints.safetensors import SINGLE, WeightFolder
from qaudit.core.fidelity import head_rows
from qaudit.core.linears import Quantized
from qaudit.errors import ModelError, SourceError
from qaudit.model.blocks import BlockModel, self_check
from qaudit.model.front import must_be_causal
from qaudit.model.links import Arguments, Tape
from qaudit.model.skeleton import load_whole
from tests.support import tiny

CPU = torch.device("cpu")


def open_model(folder: Path, dtype: torch.dtype = torch.float32) -> BlockModel:
    return BlockModel(folder, WeightFolder(folder), dtype=dtype, device=CPU)


@torch.no_grad()
def stream(model: BlockModel, tokens_BT: Tensor) -> Tensor:
    hidden_BTD = model.embed(tokens_BT)
    for block in model.blocks():
        hidden_BTD = block.forward(hidden_BTD)
    return hidden_BTD


@torch.no_grad()
def library(folder: Path, tokens_BT: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    logits_BTV: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
    return logits_BTV


def same_logits(folder: Path, dtype: torch.dtype = torch.float32) -> bool:
    tokens_BT, model = tiny.tokens(2, 20), open_model(folder, dtype)
    return torch.equal(model.logits(stream(model, tokens_BT)), library(folder, tokens_BT, dtype))


def edit(folder: Path, add: dict[str, Tensor] | None = None, drop: Sequence[str] = ()) -> Path:
    tensors = safetensors.torch.load_file(folder / SINGLE)
    tensors = {k: v for k, v in tensors.items() if k not in drop} | (add or {})
    safetensors.torch.save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def configure(folder: Path, **changes: object) -> Path:
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


def with_head(folder: Path, times: float = 1.0, drop: Sequence[str] = ()) -> None:
    """Store a head although it is tied."""
    embedding = safetensors.torch.load_file(folder / SINGLE)[EMBEDDING]
    edit(folder, add={"lm_head.weight": embedding * times}, drop=drop)


@pytest.mark.parametrize(
    ("family", "config", "change"),
    [
        *((family, {"tie_word_embeddings": tied}, lambda _: None)
          for family in ("llama", "olmo2", "gpt_neox", "gpt2", "gemma") for tied in (False, True)),
        ("olmo2", {"shard": "100KB"}, lambda _: None),
        ("gpt_neox", {"shard": "100KB"}, lambda _: None),
        ("olmo", {"tie_word_embeddings": True}, with_head),
        ("olmo", {"tie_word_embeddings": True}, lambda folder: with_head(folder, 2.0)),
        ("llama", {"tie_word_embeddings": True}, lambda f: with_head(f, drop=[EMBEDDING])),
        ("gpt_neox", {}, lambda folder: edit(folder, add=OLD_BUFFERS)),
    ],
)  # fmt: skip
def test_what_is_stored_is_loaded_as_the_library_loads_it(
    family: str, config: dict[str, Any], change: Callable[[Path], object], tmp_path: Path
) -> None:
    change(tiny.make(tmp_path, family, **config))
    assert same_logits(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 or "shard" not in config


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_compute_dtype_is_a_choice(stored: torch.dtype, tmp_path: Path) -> None:
    tiny.make(tmp_path, "olmo2")
    tensors = safetensors.torch.load_file(tmp_path / SINGLE)
    edit(tmp_path, add={name: tensor.to(stored) for name, tensor in tensors.items()})
    for dtype in (torch.float32, torch.bfloat16):
        assert same_logits(tmp_path, dtype)


def test_rotary_frequencies_stay_in_fp32(tmp_path: Path) -> None:
    model = open_model(tiny.make(tmp_path, "llama"), torch.bfloat16)
    frequencies = model._skeleton.model.model.rotary_emb.inv_freq
    config = AutoConfig.from_pretrained(tmp_path)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    expected = config.rope_parameters["rope_theta"] ** -exponents
    assert frequencies.dtype == torch.float32
    # fp32 rounds to 6e-8; bf16 would be off by 4e-3
    assert torch.allclose(frequencies.double(), expected, rtol=1e-6, atol=0)


# -------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("made", "config", "add", "drop", "said"),
    [
        ({}, {}, {"model.layers.1.mlp.extra.weight": torch.zeros(2)}, "",
         r"no place for `model\.layers\.1\.mlp\.extra\.weight`"),
        ({}, {"num_hidden_layers": 2}, {}, "", r"no place for `model\.layers\.2\..* and \d more"),
        ({}, {}, {}, "model.layers.2.self_attn.o_proj.weight",
         r"no tensor for `model\.layers\.2\.self_attn\.o_proj"),
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
def test_a_config_and_weights_that_do_not_belong_together_are_refused_by_name(
    made: dict[str, object],
    config: dict[str, object] | str | None,
    add: dict[str, Tensor],
    drop: str,
    said: str,
    tmp_path: Path,
) -> None:
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
def test_weights_that_are_codes_without_a_scale_are_refused(kind: str, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path, "qwen3")
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = safetensors.torch.load_file(folder / SINGLE)[name]
    edit(folder, add={name: tensor.to(getattr(torch, kind))})
    model = open_model(folder)
    with pytest.raises(SourceError, match=rf"`{name}` is stored as `{kind}`"):
        stream(model, tiny.tokens(1, 4))
    with pytest.raises(SourceError, match=f"is stored as `{kind}`"):
        load_whole(folder, WeightFolder(folder), torch.float32)


def small(model_type: str, **config: object) -> dict[str, object]:
    return {"model_type": model_type, **config}


@pytest.mark.parametrize(
    "config",
    [
        small("bert", architectures=["BertForMaskedLM"]),
        small("vit", architectures=["ViTForImageClassification"]),
        small("t5", architectures=["T5ForConditionalGeneration"]),
        small("whisper", architectures=["WhisperForConditionalGeneration"]),
        small("vit", num_hidden_layers=1),
    ],
    ids=lambda c: str(c),
)
def test_a_model_that_is_no_decoder_is_refused(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"(decoder|causal) language model") as info:
        open_model(tmp_path)
    assert "decoder" in info.value.hint or "next token" in info.value.hint


def test_blocks_that_see_the_future_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `bert` is refused by its configuration; others do not tell.
    monkeypatch.setattr("qaudit.model.skeleton.must_be_causal_type", lambda *_: None)
    tiny.FAMILIES["bert"] = {**tiny.FAMILIES["llama"]}
    try:
        tiny.make(tmp_path, "bert")
    finally:
        del tiny.FAMILIES["bert"]
    with pytest.raises(ModelError, match="sees tokens after it"):
        stream(open_model(tmp_path), tiny.tokens(1, 8))


def test_a_norm_that_removes_what_is_added_hides_no_look_at_the_future() -> None:
    class Ahead(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(16, elementwise_affine=False)

        def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
            return hidden_BTD + self.norm(hidden_BTD).mean(1, keepdim=True)

    hidden_BTD = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ModelError, match="in block 3 a token sees tokens after it"):
        must_be_causal(3, Ahead(), Arguments(), hidden_BTD)


def test_a_model_that_changes_hidden_states_between_blocks_is_refused() -> None:
    tape, hidden_BTD = Tape(2), torch.zeros(1, 2, 4)
    tape.pass_on(0, hidden_BTD, Arguments())
    with pytest.raises(ModelError, match="changes the hidden states before block 1"):
        tape.pass_on(1, hidden_BTD + 1, Arguments())


# ------------------------------------------------------------------------------- residency


class Watched(WeightFolder):
    """A source of weights that notes how far the blocks have been read."""

    reached = -1

    def read(self, name: str) -> Tensor:
        if ".layers." in name:
            self.reached = int(name.split(".layers.")[1].split(".")[0])
        return super().read(name)


def test_at_most_two_blocks_are_resident(tmp_path: Path) -> None:
    weights = Watched(tiny.make(tmp_path, "olmo2", num_hidden_layers=6))
    model = BlockModel(tmp_path, weights, dtype=torch.float32, device=CPU)
    assert weights.reached == -1  # nothing of a block is read before it is asked for
    for block in model.blocks():
        time.sleep(0.02)  # a reader that ran further ahead would have been there by now
        assert weights.reached <= block.index + 1
        filled = [
            i
            for i, module in enumerate(model._blocks)
            if any(not p.is_meta for p in module.parameters())
        ]
        assert filled == [block.index]
    assert all(p.is_meta for module in model._blocks for p in module.parameters())


def test_blocks_can_be_walked_again_and_left_early(tmp_path: Path) -> None:
    model, tokens_BT = open_model(tiny.make(tmp_path, "llama")), tiny.tokens(1, 12)
    first = stream(model, tokens_BT)
    for _ in model.blocks():
        break
    assert torch.equal(stream(model, tokens_BT), first)


def test_a_shape_that_was_never_embedded_is_refused(tmp_path: Path) -> None:
    model = open_model(tiny.make(tmp_path, "llama"))
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


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@torch.no_grad()
def test_installed_weights_are_used_and_taken_back(family: str, tmp_path: Path) -> None:
    model = open_model(tiny.make(tmp_path, family))
    hidden_BTD = model.embed(tiny.tokens(1, 10))
    blocks = model.blocks()  # held: a walk that is dropped gives its block back
    block = next(blocks)
    before = block.forward(hidden_BTD)
    group = block.groups[0]
    given = block.linears(group)
    kept = {name: weight.clone() for name, weight in given.weights.items()}
    block.install(Quantized({n: w * 0.5 for n, w in given.weights.items()}, bits=0))
    assert not torch.equal(block.forward(hidden_BTD), before)
    for name in group.linears:
        assert torch.equal(block.weight(name), kept[name])  # what schemes see stays as it was
    block.install(Quantized(kept, bits=0))
    assert torch.equal(block.forward(hidden_BTD), before)
    block.install(Quantized({n: w * 0 for n, w in kept.items()}, bits=0))
    block.restore()
    assert torch.equal(block.forward(hidden_BTD), before)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])  # with biases
@torch.no_grad()
def test_a_schemes_own_forward_replaces_the_matrix_and_not_the_bias(
    family: str, tmp_path: Path
) -> None:
    model = open_model(tiny.make(tmp_path, family))
    hidden_BTD = model.embed(tiny.tokens(1, 10))
    blocks = model.blocks()  # held: a walk that is dropped gives its block back
    block = next(blocks)
    before = block.forward(hidden_BTD)
    weights = {n: block.weight(n).clone() for group in block.groups for n in group.linears}
    block.install(
        Quantized(weights, 0, forwards={n: lambda x, w=w: x @ w.T for n, w in weights.items()})
    )
    # The same product in another order of additions: fp32 rounding, 64 and 128 terms.
    assert torch.allclose(block.forward(hidden_BTD), before, rtol=1e-4, atol=1e-5)
    block.install(Quantized({}, 0, forwards={n: lambda x, w=w: 0 * (x @ w.T)
                                             for n, w in weights.items()}))  # fmt: skip
    changed = block.forward(hidden_BTD)
    assert not torch.allclose(changed, before, atol=1e-3)
    block.restore()
    assert torch.equal(block.forward(hidden_BTD), before)


@torch.no_grad()
def test_what_is_installed_while_a_batch_waits_at_a_linear_is_what_it_meets(
    tmp_path: Path,
) -> None:
    model = open_model(tiny.make(tmp_path, "llama"))
    hidden_BTD = model.embed(tiny.tokens(1, 10))
    blocks = model.blocks()  # held: a walk that is dropped gives its block back
    block = next(blocks)
    name = block.groups[0].linears[0]
    weight_RC = block.weight(name)
    seen: list[str] = []

    def forward(x: Tensor) -> Tensor:
        seen.append(name)
        return x @ weight_RC.T

    def install(*_: object) -> None:
        block.install(Quantized({}, 0, forwards={name: forward}))

    handle = block.module.get_submodule(name).register_forward_pre_hook(install)
    block.forward(hidden_BTD)
    handle.remove()
    assert seen == [name]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "phi"])  # phi: q, k, v and fc1
@torch.no_grad()
def test_linears_of_a_group_read_one_changed_input(family: str, tmp_path: Path) -> None:
    model = open_model(tiny.make(tmp_path, family))
    hidden_BTD = model.embed(tiny.tokens(2, 10))
    blocks = model.blocks()  # held: a walk that is dropped gives its block back
    block = next(blocks)
    before = block.forward(hidden_BTD)
    read: list[Tensor] = []

    def double(x: Tensor) -> Tensor:
        read.append(x)
        return 2 * x

    for group in block.groups:
        weights = {name: block.weight(name).clone() / 2 for name in group.linears}
        block.install(Quantized(weights, 0, inputs=double))
    assert torch.equal(block.forward(hidden_BTD), before)  # twos are exact
    assert len(read) == len(block.groups)
    with block.as_it_was([name for group in block.groups for name in group.linears]):
        assert torch.equal(block.forward(hidden_BTD), before)
    assert len(read) == len(block.groups)
    assert torch.equal(block.forward(hidden_BTD), before)
    first = block.groups[0]
    block.install(Quantized({n: block.weight(n).clone() for n in first.linears}, 0))
    read.clear()
    assert torch.equal(block.forward(hidden_BTD), before)
    assert len(read) == len(block.groups) - 1  # what is installed anew has inputs of its own
    block.restore()
    assert torch.equal(block.forward(hidden_BTD), before)
    assert len(read) == len(block.groups) - 1


# ----------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("vocabulary", [256, 8192, 32_000, 50_304, 128_256, 262_144])
def test_a_chunk_of_logits_stays_small(vocabulary: int) -> None:
    assert 16 <= head_rows(vocabulary, "cpu") <= 256
    assert head_rows(vocabulary, "cpu") * vocabulary * 4 < 2**25


# ------------------------------------------------------------------------------- self-check


def checked(folder: Path, dtype: torch.dtype, device: torch.device) -> float:
    weights = WeightFolder(folder)
    model = BlockModel(folder, weights, dtype=dtype, device=device)
    return self_check(model, load_whole(folder, weights, dtype))


@pytest.mark.parametrize("family", ["olmo2", "gpt_neox", "gemma2"])
def test_the_self_check_finds_the_stream_equal(family: str, tmp_path: Path) -> None:
    assert checked(tiny.make(tmp_path, family), torch.bfloat16, CPU) == 0


def test_the_self_check_notices_a_stream_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.make(tmp_path, "olmo2")
    embed = BlockModel.embed
    monkeypatch.setattr(BlockModel, "embed", lambda self, tokens: embed(self, tokens) * 1.01)
    assert checked(folder, torch.float32, CPU) > 1e-6


# ------------------------------------------------------------------------------------ device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_stream_on_a_gpu_is_the_whole_model_on_a_gpu(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tiny.make(tmp_path, "olmo2", num_hidden_layers=6)
    # The head is a product of another shape, hence another kernel.
    assert checked(folder, dtype, torch.device("cuda")) < 1e-2
