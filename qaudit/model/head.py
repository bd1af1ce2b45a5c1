"""Losses from hidden states, a chunk of rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qaudit.core.fidelity import losses


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


def target_nll(
    head: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    rows_Q: Tensor,
    targets_Q: Tensor,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """Return the loss of a token after each of some rows, in fp32, and if it is the likeliest.

    A row may be asked for several tokens; it goes through the head once.
    """
    device = hidden_ND.device
    read_U, places_Q = torch.unique(rows_Q, return_inverse=True)
    nll_Q = torch.zeros(len(rows_Q), dtype=torch.float32)
    greedy_Q = torch.zeros(len(rows_Q), dtype=torch.bool)
    for start in range(0, len(read_U), rows):
        rows_U = read_U[start : start + rows].to(device)
        logits_UV = head(hidden_ND[rows_U][None])[0].float()
        some = torch.nonzero((places_Q >= start) & (places_Q < start + rows)).squeeze(1)
        at_Q = (places_Q[some] - start).to(device)
        wanted_Q = targets_Q[some].to(device)
        total_U = logits_UV.logsumexp(1)
        nll_Q[some] = (total_U[at_Q] - logits_UV[at_Q, wanted_Q]).cpu()
        greedy_Q[some] = (logits_UV.argmax(1)[at_Q] == wanted_Q).cpu()
    return nll_Q, greedy_Q
