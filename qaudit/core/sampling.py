"""What a sampler makes of logits: temperature, then top-k, then top-p.

Generation draws from this distribution, and scores of what was generated have to use the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_LIKELIEST = 1024


def log_probabilities(
    logits_NV: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> Tensor:
    """Return the logarithms of the probabilities that are drawn from, in float32 or wider.

    `top_k` keeps the likeliest tokens, `top_p` as many of them as have that probability together;
    both keep every token that is as likely as the last.
    """
    import torch

    scaled_NV = (logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()) / temperature
    if top_k is not None or top_p < 1:
        least_N1 = _least_kept(scaled_NV, top_k, top_p)
        scaled_NV = scaled_NV.masked_fill(scaled_NV < least_N1, -torch.inf)
    return scaled_NV.log_softmax(-1)


def _least_kept(scaled_NV: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Return the logit of the last token that is kept, of each row.

    To sort a vocabulary takes longer than to compute its logits, and the likeliest thousand tokens
    nearly always have the probability.
    """
    import torch

    count = min(scaled_NV.shape[-1], top_k or scaled_NV.shape[-1])
    width = count if top_k is not None else min(_LIKELIEST, count)
    while True:
        likely_NK = scaled_NV.topk(width, dim=-1).values
        of_NK = likely_NK if top_k is not None else scaled_NV
        probability_NK = (likely_NK - of_NK.logsumexp(-1, keepdim=True)).exp()
        kept_NK = probability_NK.cumsum(-1) - probability_NK < top_p
        kept_NK |= top_p >= 1
        if width == count or not bool(kept_NK[..., -1].any()):
            return likely_NK.masked_fill(~kept_NK, torch.inf).amin(-1, keepdim=True)
        width = min(16 * width, count)


def drawn_log_probability(
    logits_NV: Tensor,
    targets_N: Tensor,
    sampler: tuple[float, int | None, float],
    *,
    wrote: bool,
) -> Tensor:
    """Return the log-probability of tokens under a sampler, which cuts off what is unlikely.

    `wrote`: these are the logits that the tokens were drawn from, in other arithmetic. Then a
    token at the edge of what is kept was kept.
    """
    import torch

    log_NV = log_probabilities(logits_NV, *sampler)
    log_N = log_NV.gather(1, targets_N[:, None]).squeeze(1)
    if not wrote:
        return log_N
    scaled_NV = logits_NV.float() / sampler[0]
    target_N = scaled_NV.gather(1, targets_N[:, None]).squeeze(1)
    kept_N = scaled_NV.amax(1) - log_NV.amax(1)  # the logarithm of the sum of what is kept
    edge_N = target_N - torch.logaddexp(kept_N, target_N)
    return torch.where(torch.isneginf(log_N), edge_N, log_N)


def draw(log_probability_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Return the token at which the cumulative probability of each row passes a number in [0, 1).

    A token of probability 0 is never drawn.
    """
    import torch

    cumulative_NV = log_probability_NV.double().exp().cumsum(-1)
    limit_N1 = uniform_N.to(cumulative_NV)[:, None] * cumulative_NV[:, -1:]
    return torch.searchsorted(cumulative_NV, limit_N1, right=True).squeeze(-1)
