"""How far a stream's predictions are from those of full precision, token by token.

Full precision's logits are prepared once (`Reference.of`) and every stream is compared with them.
With z the logits, P full precision, Q the stream and d = z_Q - z_P,

    KL(P || Q) = log sum e^z_Q - log sum e^z_P - sum_i P_i d_i,

where the first terms are those of the losses. The logits are subtracted first, which is nearly
exact where they are close, then the first terms from each d, which leaves v = log Q - log P:

    KL(P || Q) = -sum_i P_i v_i,

so that comparing costs a difference, a product and a sum more than the loss. Sums of e^z in float32
are right to a few 1e-7: so is the result, measured in tests/core/test_fidelity.py. Rows where that
could be above 0.5 % of it are computed as

    KL(P || Q) = sum_i P_i (e^v_i - 1 - v_i)

because sum P e^v = sum Q = 1. Every term is at least 0, so that KL is, and small ones keep their
digits in float32: an error d of the logarithms moves the result by d^2 / 2 only. Where no |v|
reaches 1/4 a term is v^2 / 2 + v^3 / 6, and where none reaches 1/64 it is v^2 / 2, each to 0.5 % of
itself. Rows where none of these is finite (a token that P rules out, a v beyond the range of
float32) are computed by the definition, in float64. A GPU takes the exact form of v wherever the
divergence is small.

The likeliest token is the same where the stream gives full precision's likeliest token no less
than any other: a tie agrees.

Callers pass a few rows at a time (`row_parts`), all streams after each other, so that full
precision's stay in a core's cache. A row's result does not depend on how many are passed at once.

Shapes: N rows (tokens), V vocabulary, S rows that are not finite, F rows that are not near.

**Rows of logits**, a few at a time, so that they stay in a core's cache between operations.

e^x is 2^(x log2 e), which CPUs without Intel's libraries compute five times as fast: for a term
e^x of a sum that is an error of |x| 6e-8, little where the term is large.

**What a sampler makes of logits**: temperature, then top-k, then top-p.

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

from qaudit.support.lazy import Tensor, torch
from qaudit.types import RolloutChoices

Doubles = npt.NDArray[np.float64]

_NEAR = 1 / 4
_NEAREST = 1 / 64
_TRUSTED = 1e-4  # a divergence above this is 200 times the rounding
CHOSEN, TIE = 1, 2
"""Of a token that a stream would write itself; and of one that it wrote, and now would not by
rounding alone, as batches of another shape round otherwise."""
TIED = 2  # units of rounding of the highest logit that such tokens are below it


@dataclass(frozen=True, eq=False)
class ComparedRows:
    """The results of some rows of a stream; divergence is None where nothing is compared."""

    nll_N: Tensor
    kl_N: Tensor | None = None
    same_top_N: Tensor | None = None
    output_error_N: Tensor | None = None
    confidence_N: Tensor | None = None  # of full precision: the probability of its likeliest token
    likeliest_N: Tensor | None = None  # of rollouts: CHOSEN where no token is likelier, TIE, or 0
    ends_NG: Tensor | None = None  # of rollouts: the probability of each group of tokens
    drawn_N: Tensor | None = None  # of rollouts: the log-probability of the target as it was drawn
    entropy_N: Tensor | None = None  # of rollouts, where it wrote them: of what it drew from

    def with_choices(
        self,
        logits_NV: Tensor,
        targets_N: Tensor,
        choices: RolloutChoices,
        drawn_S: Tensor,
        *,
        wrote: bool,
    ) -> ComparedRows:
        """Return the rows of rollouts, by the logits that they were made of.

        `drawn_S` are those whose target was drawn and is weighed; `wrote`: from this stream.
        """
        chosen_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1)
        total_N1 = (self.nll_N + chosen_N.float())[:, None]  # the logarithm of the sum
        groups = [(logits_NV[:, [*ids]].float() - total_N1).exp().sum(1) for ids in choices.ends]
        ends_NG = torch.stack([*groups, total_N1[:, 0]], 1)[:, :-1]
        highest_N = logits_NV.amax(1)
        likeliest_N = (chosen_N == highest_N).to(torch.int8) * CHOSEN
        if wrote:
            within_N = TIED * torch.finfo(logits_NV.dtype).eps * highest_N.float().abs()
            is_tied_N = highest_N.float() - chosen_N.float() <= within_N
            likeliest_N += TIE * (is_tied_N & (likeliest_N == 0))
        drawn_N = -self.nll_N
        entropy_N = torch.zeros_like(drawn_N) if wrote else None
        drawn_S = drawn_S.to(logits_NV.device)
        if len(drawn_S) and (wrote or choices.sampler is not None):
            log_S, entropy_S = drawn_log_probability(
                logits_NV, targets_N, drawn_S, choices.sampler or (1.0, None, 1.0), wrote=wrote
            )
            if choices.sampler is not None:
                drawn_N[drawn_S] = log_S
            if entropy_N is not None and entropy_S is not None:
                entropy_N[drawn_S] = entropy_S
        return replace(
            self, likeliest_N=likeliest_N, ends_NG=ends_NG, drawn_N=drawn_N, entropy_N=entropy_N
        )


@dataclass(frozen=True, eq=False)
class Reference:
    """The rows of full precision, prepared once for all streams."""

    logits_NV: Tensor  # in float32
    weights_NV: Tensor  # e^(logit - highest): probabilities before they are divided by `total_N1`
    highest_N1: Tensor
    total_N1: Tensor
    top_N1: Tensor  # the likeliest token
    nll_N: Tensor

    @property
    def rows(self) -> ComparedRows:
        """The results of these rows; e^(logit - highest) of the likeliest token is 1."""
        return ComparedRows(self.nll_N, confidence_N=self.total_N1.reciprocal().squeeze(1))

    @classmethod
    def of(cls, logits_NV: Tensor, targets_N: Tensor) -> Reference:
        z_NV = logits_NV.float()
        if z_NV.device.type == "cpu":  # `max` takes three times as long as these two
            highest_N1, top_N1 = (
                z_NV.amax(1, True),
                torch.from_numpy(z_NV.numpy().argmax(1))[:, None],
            )
        else:
            highest_N1, top_N1 = z_NV.max(1, keepdim=True)
        weights_NV = _exponentials(z_NV, highest_N1)
        total_N1 = weights_NV.sum(1, keepdim=True)
        nll_N = _nll(total_N1, highest_N1, z_NV.gather(1, targets_N[:, None]))
        return cls(z_NV, weights_NV, highest_N1, total_N1, top_N1, nll_N)

    def compare(self, logits_NV: Tensor, targets_N: Tensor) -> ComparedRows:
        """Return the loss and the divergence of each row of a stream with the same vocabulary."""
        q_NV = logits_NV.float()
        highest_N1 = q_NV.amax(1, keepdim=True)
        work_NV = _exponentials(q_NV, highest_N1)
        total_N1 = work_NV.sum(1, keepdim=True)
        nll_N = _nll(total_N1, highest_N1, q_NV.gather(1, targets_N[:, None]))
        same_N = (q_NV.gather(1, self.top_N1) == highest_N1).squeeze(1)
        compare = self._compare_on_cpu if q_NV.device.type == "cpu" else self._compare_on_gpu
        return ComparedRows(nll_N, compare(q_NV, work_NV, highest_N1, total_N1), same_N)

    def _compare_on_gpu(
        self, q_NV: Tensor, work_NV: Tensor, highest_N1: Tensor, total_N1: Tensor
    ) -> Tensor:
        """Return divergences by both forms of v: a GPU would wait to learn which rows are small."""
        # In float64: the two are close, and each is rounded already.
        shift_N1 = highest_N1.double() - self.highest_N1.double()
        shift_N1 += (total_N1.double() / self.total_N1.double()).log()
        rounded_N1 = shift_N1.float()
        v_NV = torch.sub(q_NV, self.logits_NV, out=work_NV).sub_(rounded_N1)
        # What P rules out adds nothing, whatever Q makes of it; other NaN are in the shift, too.
        sums_N1 = (v_NV * self.weights_NV).nan_to_num_(0, torch.inf, -torch.inf).sum(1, True)
        kl_N1 = shift_N1 - rounded_N1.double() - sums_N1 / self.total_N1
        kl_N = kl_N1.squeeze(1).float().clamp_(min=0)
        small_N = _excess(v_NV, self.weights_NV) / self.total_N1.squeeze(1)
        is_small_N = (kl_N <= _TRUSTED) & torch.isfinite(small_N)
        return torch.where(is_small_N, small_N.clamp_(min=0), kl_N)

    @np.errstate(all="ignore")  # what is not finite is computed again
    def _compare_on_cpu(
        self, q_NV: Tensor, work_NV: Tensor, highest_N1: Tensor, total_N1: Tensor
    ) -> Tensor:
        """Return divergences by the form that fits each row.

        What is a number a row is in numpy, which takes a third of torch's time for so few.
        """
        ratio_N1 = _double(total_N1) / _double(self.total_N1)
        shift_N1 = _double(highest_N1) - _double(self.highest_N1) + np.log(ratio_N1)
        rounded_N1 = shift_N1.astype(np.float32)
        v_NV = torch.sub(q_NV, self.logits_NV, out=work_NV).sub_(torch.from_numpy(rounded_N1))
        terms_NV = v_NV * self.weights_NV
        sums_N1 = _double(terms_NV.sum(1, keepdim=True))
        kl_N1 = shift_N1 - rounded_N1 - sums_N1 / _double(self.total_N1)
        trusted_N1 = kl_N1 > _TRUSTED
        if not trusted_N1.all():
            kl_N1 = np.where(trusted_N1, kl_N1, self._small(v_NV, terms_NV))
        kl_N = torch.from_numpy(kl_N1[:, 0].astype(np.float32))
        if not np.isfinite(kl_N1).all():
            odd_S = ~torch.isfinite(kl_N)
            kl_N[odd_S] = divergence(self.logits_NV[odd_S], q_NV[odd_S]).float()
        return kl_N

    def _small(self, v_NV: Tensor, terms_NV: Tensor) -> Doubles:
        """Return the divergence of rows by the forms for small ones; `terms_NV` are P v."""
        # Two passes: a norm, or `aminmax`, along a dimension takes 20 times as long on a CPU.
        highest_N1, lowest_N1 = _double(v_NV.amax(1, True)), _double(v_NV.amin(1, True))
        farthest_N1 = np.maximum(highest_N1, -lowest_N1)
        kl_N1 = _double(terms_NV.mul_(v_NV).sum(1, keepdim=True)) / 2
        nearest_N1 = farthest_N1 < _NEAREST
        if not nearest_N1.all():
            cubes_N1 = _double(terms_NV.mul_(v_NV).sum(1, keepdim=True)) / 6
            kl_N1 += np.where(nearest_N1, 0, cubes_N1)
        far_F = np.flatnonzero(~(farthest_N1 < _NEAR))
        if len(far_F):
            # Two at least: of a single row threads would split the sum, which then ends otherwise.
            rows_F = torch.from_numpy(far_F if len(far_F) > 1 else far_F.repeat(2))
            sums_F = _excess(v_NV[rows_F], self.weights_NV[rows_F])[: len(far_F)]
            kl_N1[far_F] = _double(sums_F[:, None])
        return np.maximum(kl_N1 / _double(self.total_N1), 0)


def _double(some_N1: Tensor) -> Doubles:
    return some_N1.numpy().astype(np.float64)


def _excess(v_NV: Tensor, weights_NV: Tensor) -> Tensor:
    """Return the sums of e^v - 1 - v, which near 1e-7 is rounding of either sign."""
    return torch.expm1(v_NV).sub_(v_NV).mul_(weights_NV).sum(1)


def output_error(full_ND: Tensor, hidden_ND: Tensor) -> Tensor | None:
    """Relate |h - h'|^2 to |h|^2 token by token, h being what the last block returns.

    It is R_L of 2509.23500, taken by token and averaged, so that the few tokens with huge states
    do not decide alone. None where widths differ.
    """
    if full_ND.shape != hidden_ND.shape:
        return None
    full_ND, hidden_ND = full_ND.float(), hidden_ND.float()
    squares_N = full_ND.square().sum(1)
    return (hidden_ND - full_ND).square_().sum(1) / squares_N.clamp(min=1e-30)


def losses(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Return -log p of each row's target in float32."""
    parts = []
    for part in row_parts(logits_NV):
        z_NV = logits_NV[part].float()
        highest_N1 = z_NV.amax(1, keepdim=True)
        total_N1 = _exponentials(z_NV, highest_N1).sum(1, keepdim=True)
        parts.append(_nll(total_N1, highest_N1, z_NV.gather(1, targets_N[part, None])))
    return torch.cat(parts)


def divergence(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """Return KL(P || Q) of rows of logits by its definition in float64."""
    logp_NV, logq_NV = (torch.log_softmax(z_NV.double(), -1) for z_NV in (p_NV, q_NV))
    terms_NV = logp_NV.exp() * (logp_NV - logq_NV)
    # What P rules out adds nothing, whatever Q makes of it.
    return torch.where(logp_NV == -torch.inf, 0.0, terms_NV).sum(-1)


def _exponentials(z_NV: Tensor, highest_N1: Tensor) -> Tensor:
    """Return e^(z - highest)."""
    return (z_NV - highest_N1).mul_(LOG2_E).exp2_()


def _nll(total_N1: Tensor, highest_N1: Tensor, chosen_N1: Tensor) -> Tensor:
    return (total_N1.log() + highest_N1 - chosen_N1).squeeze(1)


LOG2_E = math.log2(math.e)
CORE_ELEMENTS = 2**18  # a megabyte in float32
CUDA_ELEMENTS = 2**24

# Logits of a chunk stay under 32 MiB on the CPU: up to there glibc hands the same memory out again,
# above it every chunk is mapped afresh and its page faults cost more than the sums.
_HEAD_ELEMENTS, _HEAD_ROWS = 2**23 - 2**16, 256
_CUDA_HEAD_ELEMENTS, _CUDA_HEAD_ROWS = 2**26, 4096


def head_rows(vocabulary: int, device: str) -> int:
    """Return how many rows of logits a kind of device has in memory at once."""
    on_cpu = device == "cpu"
    elements = _HEAD_ELEMENTS if on_cpu else _CUDA_HEAD_ELEMENTS
    return min(max(elements // max(vocabulary, 1), 16), _HEAD_ROWS if on_cpu else _CUDA_HEAD_ROWS)


def row_parts(logits_NV: Tensor, rows: int | None = None) -> Iterator[slice]:
    """Yield slices of all rows, or of so many of them.

    Of at least two: of a single one, threads would split the sum.
    """
    rows = len(logits_NV) if rows is None else rows
    per_core = CORE_ELEMENTS * torch.get_num_threads()
    elements = CUDA_ELEMENTS if logits_NV.device.type == "cuda" else per_core
    count = max(1, rows // max(2, elements // logits_NV.shape[1]))
    for k in range(count):
        yield slice(rows * k // count, rows * (k + 1) // count)


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
    width = _FIRST if top_k is None else most + _TIED
    while len(due_S):
        width = min(width, entries)
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
        due_S = due_S[~lost_SK[:, -1]] if width < entries else due_S[:0]
        width *= _MORE
    return least_S1, kept_S1, entropy_S1


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


def _array(values_NV: Tensor) -> npt.NDArray[np.floating[Any]]:
    return values_NV.to(torch.promote_types(values_NV.dtype, torch.float32)).numpy()


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
