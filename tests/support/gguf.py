"""Weights and importance for GGUF blocks, the same numbers on every machine; and whole files."""

import json
import re

import gguf
import numpy as np
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.gguf import pack

ROWS, COLUMNS = 24, 512

# sha256 of what ggml_quantize_chunk makes of `weight()`, without and with `importance()`;
# tests/peers/test_llamacpp.py computes them again.
HASHES = {
    (kind, bool(k)): found
    for kind, both in {
        "Q8_0": ("1ceb846a954beb29", "1ceb846a954beb29"),
        "Q4_0": ("05e7a8e58306678d", "61c9bd7fb5a9e9f9"),
        "Q5_0": ("17e33260302a99c1", "efbef70d5243856b"),
        "Q5_1": ("280d817914b52453", "42677dc059823568"),
        "Q3_K": ("ee6b04487dfc04ff", "c34a3152b0ae86a3"),
        "Q4_K": ("a20a4a50a15585c1", "b8d4eb40246d729f"),
        "Q5_K": ("5c239cf79d61bce6", "9194de67c805a41a"),
        "Q6_K": ("9d93e5965bcc4628", "5f0c271c48c1b85b"),
    }.items()
    for k, found in enumerate(both)
}


def _numbers(count, start):
    """Return integers in +-2^15 of a congruential generator."""
    state, out = start, np.empty(count, np.int64)
    for k in range(count):
        state = (1664525 * state + 1013904223) % 2**32
        out[k] = (state >> 16) - 2**15
    return out


def weight():
    """Return rows of many kinds: cubes of numbers, zeros, constants, large and small ones."""
    cubes = (_numbers(ROWS * COLUMNS, 1) ** 3).astype(np.float32) * np.float32(2.0**-49)
    values = cubes.reshape(ROWS, COLUMNS)
    values[1], values[2, :300], values[3, 1:] = 0, 0, 0
    values[4], values[5] = np.float32(0.01), np.float32(-0.02)
    values[6] *= np.float32(2.0**-20)
    values[7] *= np.float32(2.0**-60)
    values[8] *= np.float32(2.0**16)
    values[9], values[10] = abs(values[9]), -abs(values[10])
    values[11] = (_numbers(COLUMNS, 5) % 5 - 2).astype(np.float32)
    return torch.from_numpy(values)


def importance():
    """Return mean squares of columns, some of them zero."""
    values = (_numbers(COLUMNS, 9) ** 2).astype(np.float32) * np.float32(2.0**-28)
    values[100:140] = 0
    return torch.from_numpy(values)


# ---------------------------------------------------------------------------- whole files

ARCHITECTURES = {
    "olmo3": "olmo2",
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "cohere": "command-r",
}
_INTERLEAVED = ("llama", "olmo", "smollm3", "granite")
_ADDS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")  # to what norms multiply by
_LAYER_NORMS = {"olmo": "", "starcoder2": "norm_epsilon", "nemotron": "norm_eps",
                "command-r": "layer_norm_eps", "cohere2": "layer_norm_eps",
                "stablelm": "layer_norm_eps"}  # fmt: skip

_EVERY = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "vocab_size": "vocab_size",
}  # fmt: skip
_WINDOW = {"attention.sliding_window": "sliding_window"}
_OF_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size"}
_SCALE = {"logit_scale": "logit_scale"}
_SOME = {
    **dict.fromkeys(("olmo2", "gemma3", "phi3", "starcoder2"), _WINDOW),
    "qwen3moe": _OF_EXPERTS,
    "qwen2moe": {
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size", **_OF_EXPERTS
    },
    "gemma2": {
        **{name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}, **_WINDOW
    },
    "granite": {
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    },
    "command-r": _SCALE,
    "cohere2": _SCALE | _WINDOW,
    "stablelm": {"use_parallel_residual": "use_parallel_residual"},
}  # fmt: skip


def permuted(weights, heads):
    """Reorder rows of q and k as `LlamaModel.permute` of llama.cpp's converter does."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(
    folder, path, kind_of=lambda name: "F32", *, dense=None, metadata=None, words=True, more=None
):
    """Write a model's folder as a GGUF file; return the weights that the file means.

    `kind_of` names the type of each matrix. A tied head is written again, which OLMo 2 needs.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = str(config["model_type"])
    architecture = ARCHITECTURES.get(model, model)
    writer = gguf.GGUFWriter(path, architecture)
    facts = _facts(config, architecture)
    if words and (folder / "tokenizer.json").is_file():
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        facts["tokenizer.ggml.tokens"] = sorted(vocabulary, key=vocabulary.__getitem__)
    _add(writer, {**facts, **(metadata or {})})
    stored = WeightFolder(folder)
    tensors = dense or {name: stored.read(name).float() for name in stored.names()}
    if architecture == "olmo2" and "lm_head.weight" not in tensors:
        tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    (number,) = (n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    meant = {}
    heads = {"q_proj": config["num_attention_heads"]}
    heads["k_proj"] = config.get("num_key_value_heads", heads["q_proj"])
    for name, members in _with_experts(tensors).items():
        values = np.stack([tensors[member].float().numpy() for member in members])
        values, role = values[0] if members == [name] else values, name.split(".")[-2]
        kind = kind_of(members[0]) if values.ndim > 1 else "F32"
        if architecture in _INTERLEAVED and role in heads:
            values = permuted(values, heads[role])
        if architecture in _ADDS_ONE and name.endswith("norm.weight"):
            values = values + 1
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        number = gguf.GGMLQuantizationType[kind]
        if kind in ("F32", "F16", "BF16") or kind not in KINDS:
            data = gguf.quants.quantize(values, number)
        else:
            rows = torch.from_numpy(values.reshape(-1, values.shape[-1]).copy())
            data = pack(kind, rows).numpy().reshape(*values.shape[:-1], -1)
        raw = None if kind in ("F32", "F16") else number
        writer.add_tensor(own, np.ascontiguousarray(data), raw_dtype=raw)
        read = gguf.quants.dequantize(data, number).reshape(values.shape)
        for member, part in zip(members, read[None] if members == [name] else read, strict=True):
            meant[member] = _read_back(part, member, role, heads, architecture)
    for name, tensor in (more or {}).items():
        writer.add_tensor(f"{name}.weight", tensor.float().numpy())
    _write(writer)
    return meant


KINDS = ("Q8_0", "Q4_0", "Q5_0", "Q5_1", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def _with_experts(tensors):
    """Return the tensors of a file, those of experts one for each of their matrices."""
    merged = {}
    for name in tensors:
        merged.setdefault(re.sub(r"(\.experts)\.\d+\.", r"\1.", name), []).append(name)
    return merged


def _read_back(values, name, role, heads, architecture):
    if architecture in _INTERLEAVED and role in heads:
        order = permuted(np.arange(len(values)), heads[role])
        values = values[np.argsort(order)]
    if architecture in _ADDS_ONE and name.endswith("norm.weight"):
        values = values - np.float32(1)
    return torch.from_numpy(np.array(values, np.float32))


def _facts(config, architecture):
    """Return the metadata that a file has of a configuration."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    head = config.get("head_dim") or width // heads
    epsilon = _LAYER_NORMS.get(architecture, "rms_norm_eps")
    norm = "layer_norm" if architecture in _LAYER_NORMS else "layer_norm_rms"
    facts = {key: config.get(name) for key, name in (_EVERY | _SOME.get(architecture, {})).items()}
    facts |= {
        "attention.head_count_kv": config.get("num_key_value_heads", heads),
        f"attention.{norm}_epsilon": config.get(epsilon, 1e-5),
        "rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "rope.dimension_count": int(head * part),
    }
    if head * heads != width:
        facts |= {"attention.key_length": head, "attention.value_length": head}
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        facts |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    if architecture == "olmo2" and config.get("sliding_window"):
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        facts["attention.sliding_window_pattern"] = pattern
    found = {f"{architecture}.{key}": value for key, value in facts.items() if value is not None}
    return {"tokenizer.ggml.model": "none", **found}


def rewrite(path, out, metadata):
    """Write a file again with other metadata."""
    source = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, source.fields["general.architecture"].contents())
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in (
            *metadata,
            "general.architecture",
        ):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    _add(writer, metadata)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _write(writer)


def _write(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer, metadata):
    add = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}
    add[list] = writer.add_array
    for key, value in metadata.items():
        add.get(type(value), writer.add_uint32)(key, value)
