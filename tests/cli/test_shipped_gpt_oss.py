"""A GGUF file of gpt-oss beside the release: the same MXFP4 codes, in another order."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from qaudit.checkpoints.configuration import read_configuration
from tests.support import quantized_bases
from tests.support.cli import TEXT, Run, audit_of

BASE = "series/step10"


def repacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Order codes as ggml does: behind the scale of 32 columns, column j beside column j + 16."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    both = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], both], -1).reshape(*blocks.shape[:2], -1)


def write(folder: Path, path: Path) -> None:
    config, tensors = read_configuration(folder), load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_sliding_window(config["sliding_window"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config["num_hidden_layers"])
    for name, values in tensors.items():
        stem, _, kind = name.rpartition("_")
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if kind == "scales":
            packed = repacked(tensors[f"{stem}_blocks"], values)
            down = stem.endswith("down_proj")
            parts = {"down": packed} if down else {"gate": packed[:, ::2], "up": packed[:, 1::2]}
            for role, part in parts.items():
                own, raw = f"{layer}.ffn_{role}_exps.weight", gguf.GGMLQuantizationType.MXFP4
                writer.add_tensor(own, np.ascontiguousarray(part), raw_dtype=raw)
        elif name.endswith("gate_up_proj_bias"):
            for k, role in enumerate(("gate", "up")):
                own = f"{layer}.ffn_{role}_exps.bias"
                writer.add_tensor(own, np.ascontiguousarray(values[:, k::2]))
        elif name.endswith("down_proj_bias"):
            writer.add_tensor(f"{layer}.ffn_down_exps.bias", values)
        elif name.endswith("sinks"):
            writer.add_tensor(f"{layer}.attn_sinks.weight", values)
        elif kind != "blocks":
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_codes_of_a_release_are_those_of_its_gguf_file(place: Path, qaudit: Run) -> None:
    ships, _ = quantized_bases.write(place, "gpt-oss", place / BASE)
    write(ships, place / "gpt-oss.gguf")
    options = ("--schemes", "none", "--shipped", "gpt-oss.gguf", "--out", "out")
    done = qaudit("scan", ships, *TEXT, *options)
    assert done.code == 0, done.err
    rows = {row["scheme"]: row for row in audit_of(place / "out")["measurements"]}
    assert rows["gpt-oss"]["ce"] == rows["fp"]["ce"]
    assert rows["gpt-oss"]["kl"] == pytest.approx(0, abs=1e-9)
    assert not any("broken" in note for note in rows["gpt-oss"]["notes"])
