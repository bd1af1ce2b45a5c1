"""Losses from hidden states, a chunk of rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qaudit.core.fidelity import gpu_head_rows, losses

# Fp32 logits of a chunk stay under 32 MiB on the CPU: up to there glibc hands the same memory
# out again, above it every chunk is mapped afresh and its page faults cost more than the sums.
_CPU_ELEMENTS, _CPU_ROWS = 2**23 - 2**16, 256


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Return how many rows of logits to have in memory at once."""
    if device.type == "cpu":
        return min(max(_CPU_ELEMENTS // vocabulary, 16), _CPU_ROWS)
    return gpu_head_rows(vocabulary)


def chunked_nll(
    head: Callable[[Tensor], Tensor], hidden_BTD: Tensor, tokens_BT: Tensor, rows: int
) -> Tensor:
    """Return -log p(token | tokens before it) in fp32; position 0 has nothing before it, and 0.

    The log-sum-exp is taken in fp32 while a chunk of rows is warm in the cache. For a small model
    with a large vocabulary this is most of an evaluation's work, and a full (B, T, V) tensor most
    of its memory. Given up: the order of additions inside a chunk.
    """
    batch, length, width = hidden_BTD.shape
    nll_BT = torch.zeros(batch, length, dtype=torch.float32, device=hidden_BTD.device)
    if length < 2:
        return nll_BT
    hidden_ND = hidden_BTD[:, :-1].reshape(-1, width)
    targets_N = tokens_BT[:, 1:].reshape(-1).to(hidden_BTD.device, torch.long)
    chunks = [
        losses(head(hidden_ND[i : i + rows].unsqueeze(0))[0], targets_N[i : i + rows])
        for i in range(0, len(targets_N), rows)
    ]
    nll_BT[:, 1:] = torch.cat(chunks).reshape(batch, length - 1)
    return nll_BT
