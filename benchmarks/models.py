"""Llama-shaped models with random weights and random tokens, made when a benchmark runs.

Speed does not depend on what weights say. Tokens come as (2N, context): the first half is for
calibration, the second for evaluation, the same for everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

CONTEXT = 512


@dataclass(frozen=True)
class Shape:
    """A model's sizes, a group size that divides its rows, and how many windows to use."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    group: int
    windows: int


SHAPES = {
    "15M": Shape(288, 768, 6, 6, 6, 32000, group=32, windows=64),
    "135M": Shape(576, 1536, 30, 9, 3, 49152, group=64, windows=16),
    "7B": Shape(4096, 11008, 2, 32, 32, 100_352, group=128, windows=64),  # two blocks of it
}


def make_model(folder: Path, shape: Shape, dtype: str) -> None:
    """Write a model with random weights, and tokens beside it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    draw = np.random.default_rng(1)
    tokens = draw.integers(3, shape.vocabulary, (2 * shape.windows, CONTEXT), dtype=np.int32)
    np.save(folder / "tokens.npy", tokens)


def read_tokens(folder: Path) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the windows for calibration and those for evaluation."""
    tokens = np.load(folder / "tokens.npy")
    half = len(tokens) // 2
    return tokens[:half], tokens[half:]
