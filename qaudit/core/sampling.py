"""What a sampler makes of logits: temperature, then top-k, then top-p.

Generation draws from this distribution, and scores of what was generated have to use the same.

To sort a vocabulary takes longer than to compute its logits. Where tokens are set in columns, the
few likeliest are in the columns with the largest maxima. More are looked at only in rows that keep
more, or where further tokens may be as likely as the last that is kept.

Shapes: N rows of logits, S of them, V vocabulary, R rows and C columns of it, K tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from qaudit.core.rows import LOG2_E, row_parts
from qaudit.support.lazy import Tensor, torch

Floats = npt.NDArray[np.floating[Any]]
Sampler = tuple[float, int | None, float]
"""Temperature, top-k and top-p."""

_FIRST, _MORE = 256, 16  # tokens that are looked at first, and how many times as many then
_LEAST_LOG = -1e4  # in place of minus infinity, which times 0 is no number
_TIED = 16  # tokens that may be as likely as the last of top-k


def log_probabilities(
    logits_NV: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> Tensor:
    """Return the logarithms of the probabilities that are drawn from, in float32 or wider.

    `top_k` keeps the likeliest tokens, `top_p` as many of them as have that probability together;
    both keep every token that is as likely as the last.
    """
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    scaled_NV = logits_NV / temperature
    if top_k is not None or top_p < 1:
        every = _Rows(logits_NV, torch.arange(len(logits_NV), device=logits_NV.device))
        least_N1 = _kept(every, temperature, top_k, top_p)[0]
        scaled_NV = scaled_NV.masked_fill(logits_NV < least_N1, -torch.inf)
    return scaled_NV.log_softmax(-1)


def drawn_log_probability(
    logits_NV: Tensor, targets_N: Tensor, rows_S: Tensor, sampler: Sampler, *, wrote: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of the targets of some rows under a sampler, which cuts tokens.

    `wrote`: these are the logits that the tokens were drawn from, in other arithmetic. Then a
    token at the edge of what is kept was kept, and the entropy of what they were drawn from comes
    along: minus the logarithm of a draw has it as its mean.
    """
    temperature, top_k, top_p = sampler
    rows = _Rows(logits_NV, rows_S)
    target_S1 = logits_NV[rows_S, targets_N[rows_S]][:, None].to(rows.dtype)
    scaled_S1 = target_S1 / temperature
    if top_k is None and top_p >= 1:
        (sums_SK,) = rows.each(partial(_log_sum, temperature=temperature, with_entropy=wrote))
        return scaled_S1.squeeze(1) - sums_SK[:, 0], sums_SK[:, 1] if wrote else None
    least_S1, kept_S1, entropy_S1 = _kept(rows, temperature, top_k, top_p)
    edge_S1 = scaled_S1 - torch.logaddexp(kept_S1, scaled_S1) if wrote else -torch.inf
    log_S1 = torch.where(target_S1 >= least_S1, scaled_S1 - kept_S1, edge_S1)
    return log_S1.squeeze(1), entropy_S1.squeeze(1) if wrote else None


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of logits."""

    logits_NV: Tensor
    rows_S: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.logits_NV.dtype, torch.float32)

    def each(self, *functions: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Yield what each function makes of all rows, of which few are in a cache at once."""
        made = []
        for part in row_parts(self.logits_NV, len(self.rows_S)):
            logits_SV = self.logits_NV[self.rows_S[part]]
            made.append([function(logits_SV).to(self.dtype) for function in functions])
        yield from (torch.cat(column) for column in zip(*made, strict=True))


def _kept(
    rows: _Rows, temperature: float, top_k: int | None, top_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lowest logit that is kept of each row; of all, scaled: log-sum and entropy."""
    entries, count = rows.logits_NV.shape[1], len(rows.rows_S)
    most = min(entries, top_k or entries)
    least_S1, kept_S1, entropy_S1 = rows.logits_NV.new_empty(3, count, 1, dtype=rows.dtype)
    total_S1: Tensor | None = None
    due_S = torch.arange(count, device=rows.rows_S.device)
    for width in _widths(entries, _FIRST if top_k is None else most + _TIED):
        functions = [partial(_likeliest, count=width)]
        if top_k is None and total_S1 is None:
            functions.append(partial(_log_sum, temperature=temperature))
        likely_SK, *total = replace(rows, rows_S=rows.rows_S[due_S]).each(*functions)
        total_S1 = total[0] if total else total_S1
        scaled_SK = likely_SK / temperature
        first_SK = scaled_SK[:, :most]
        of_S1 = first_SK.logsumexp(-1, keepdim=True) if total_S1 is None else total_S1[due_S]
        probability_SK = (first_SK - of_S1).exp()
        is_kept_SK = (probability_SK.cumsum(-1) - probability_SK < top_p) | (top_p >= 1)
        last_S1 = likely_SK[:, :most].masked_fill(~is_kept_SK, torch.inf).amin(-1, keepdim=True)
        lost_SK = likely_SK < last_S1
        least_S1[due_S] = last_S1
        log_SK = scaled_SK.masked_fill(lost_SK, -torch.inf)
        kept_S1[due_S] = log_SK.logsumexp(-1, keepdim=True)
        log_SK = log_SK.sub_(kept_S1[due_S]).clamp_(min=_LEAST_LOG)
        entropy_S1[due_S] = -(log_SK.exp() * log_SK).sum(-1, keepdim=True)
        due_S = due_S[~lost_SK[:, -1]]
        if not len(due_S):
            break
    return least_S1, kept_S1, entropy_S1


def _widths(entries: int, first: int) -> Iterator[int]:
    while first < entries:
        yield first
        first *= _MORE
    yield entries


def _likeliest(logits_NV: Tensor, count: int) -> Tensor:
    entries = logits_NV.shape[1]
    column = math.isqrt(entries // count)  # tokens: few maxima, and few tokens beside the largest
    if column < 3:
        return _ordered(logits_NV, count)
    whole = entries // column * column
    columns_NRC = logits_NV[:, :whole].unflatten(1, (column, -1))
    places_NK = _places(columns_NRC.amax(1), count)
    near_NRK = columns_NRC.gather(2, places_NK[:, None].expand(-1, column, -1))
    return _ordered(torch.cat([near_NRK.flatten(1), logits_NV[:, whole:]], 1), count)


def _places(values_NV: Tensor, count: int) -> Tensor:
    if values_NV.device.type != "cpu":
        return values_NV.topk(count, dim=-1, sorted=False).indices
    return torch.from_numpy(np.argpartition(_array(values_NV), -count, axis=1)[:, -count:])


def _ordered(values_NV: Tensor, count: int) -> Tensor:
    """Return the largest values of each row in order; `topk` takes ten times as long on a CPU."""
    if values_NV.device.type != "cpu":
        return values_NV.topk(count, dim=-1).values
    largest_NK = np.partition(_array(values_NV), -count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(largest_NK, axis=1)[:, ::-1].copy())


def _array(values_NV: Tensor) -> Floats:
    array: Floats = values_NV.to(torch.promote_types(values_NV.dtype, torch.float32)).numpy()
    return array


def _log_sum(logits_NV: Tensor, temperature: float, *, with_entropy: bool = False) -> Tensor:
    """Return the log-sums of scaled logits, in a third of the time of `logsumexp`."""
    highest_N1 = logits_NV.amax(1, keepdim=True)
    highest_N1 = highest_N1.to(torch.promote_types(highest_N1.dtype, torch.float32))
    powers_NV = torch.sub(logits_NV, highest_N1).mul_(LOG2_E / temperature)
    weights_NV = powers_NV.exp2() if with_entropy else powers_NV.exp2_()
    total_N1 = weights_NV.sum(1, keepdim=True)
    log_N1 = total_N1.log().add_(highest_N1 / temperature)
    if not with_entropy:
        return log_N1
    mean_N1 = (weights_NV * powers_NV.clamp_(min=_LEAST_LOG)).sum(1, keepdim=True) / total_N1
    return torch.cat([log_N1, total_N1.log() - mean_N1 / LOG2_E], 1)


def draw(log_probability_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Return the token at which the cumulative probability of a row passes a number in [0, 1)."""
    cumulative_NV = log_probability_NV.double().exp().cumsum(-1)
    limit_N1 = uniform_N.to(cumulative_NV)[:, None] * cumulative_NV[:, -1:]
    return torch.searchsorted(cumulative_NV, limit_N1, right=True).squeeze(-1)
