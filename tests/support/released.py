"""Tiny models of two blocks with the tensors of releases: experts one by one, towers, scalars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from tests.support.models import text
from tests.support.reference.plain_gptq import find_scale
from tests.support.tiny import TABLES, save_moved

RELEASED, OTHERS = TABLES["released"], TABLES["others"]
FOR_LLAMA_CPP = TABLES["llama.cpp"]["gemma3"]
WRAPPERS = ("gemma3", "gemma4", "idefics3", "mistral_large4")
UNQUANTIZED = ("embed_tokens", "lm_head", "norm", "gate.weight", "router", "bias", "sinks")


def save(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of a family as its releases are saved, without a tokenizer."""
    config = AutoConfig.for_model(family, **{**{**RELEASED, **OTHERS}[family], **changes})
    torch.manual_seed(seed)
    return save_moved(_auto(family).from_config(config, dtype=torch.float32), folder)


def plain(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model as its users do."""
    return _auto(family).from_pretrained(folder, dtype=dtype).eval()


def _auto(family: str) -> Any:
    return AutoModelForImageTextToText if family in WRAPPERS else AutoModelForCausalLM


@torch.no_grad()
def plain_loss(folder: Path, family: str) -> float:
    """Return the loss that transformers itself has on the evaluation text of tests, by token."""
    model, tokenizer = plain(folder, family), AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for seed in range(200, 212):
        tokens = torch.tensor([tokenizer(text(seed))["input_ids"]])
        for part in tokens.split(32, 1):
            logits = model(input_ids=part, use_cache=False).logits[0, :-1]
            nll = torch.nn.functional.cross_entropy(logits, part[0, 1:], reduction="sum")
            total, count = total + float(nll), count + part.shape[1] - 1
    return total / count


def rounded(weight: Tensor) -> Tensor:
    """Round each row to its own symmetric grid of 4 bits."""
    w = weight.double().numpy()
    scale, zero = find_scale(w, 4, True, "bf16")
    codes = np.clip(np.round(w / scale[:, None]) + zero[:, None], 0, 15)
    return torch.from_numpy((codes - zero[:, None]) * scale[:, None]).to(weight.dtype)


def round_file(folder: Path) -> None:
    """Round every matrix of every expert and of attention in the files themselves."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if any(part in name for part in UNQUANTIZED):
            continue
        if tensor.dim() == 3:  # gpt-oss stores (experts, inputs, outputs)
            tensors[name] = torch.stack([rounded(w.T).T.contiguous() for w in tensor])
        else:
            tensors[name] = rounded(tensor)
    save_file(tensors, path, metadata={"format": "pt"})


def text_of_wrapper(folder: Path, text: Path) -> Path:
    """Save the text of a Gemma 3 wrapper as a model of its own."""
    config = json.loads((folder / "config.json").read_text())["text_config"]
    text.mkdir()
    (text / "config.json").write_text(
        json.dumps({**config, "architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True})
    )
    inside = "language_model."
    tensors = load_file(folder / "model.safetensors")
    own = {n.removeprefix(inside): t for n, t in tensors.items() if n.startswith(inside)}
    save_file(own, text / "model.safetensors", metadata={"format": "pt"})
    return text
