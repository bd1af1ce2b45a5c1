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

Callers pass a few rows at a time (`core/rows.py`), all streams after each other, so that full
precision's stay in a core's cache. A row's result does not depend on how many are passed at once.

Shapes: N rows (tokens), V vocabulary, S rows that are not finite, F rows that are not near.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qaudit.core.rows import LOG2_E, row_parts
from qaudit.core.sampling import drawn_log_probability
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
        highest_N1, top_N1 = _highest(z_NV)
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


def _highest(z_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest logit of each row, and the first place of it."""
    if z_NV.device.type != "cpu":
        return z_NV.max(1, keepdim=True)
    highest_N1 = z_NV.amax(1, keepdim=True)  # `max` takes three times as long as these two
    return highest_N1, torch.from_numpy(z_NV.numpy().argmax(1))[:, None]


def _exponentials(z_NV: Tensor, highest_N1: Tensor) -> Tensor:
    """Return e^(z - highest)."""
    return (z_NV - highest_N1).mul_(LOG2_E).exp2_()


def _nll(total_N1: Tensor, highest_N1: Tensor, chosen_N1: Tensor) -> Tensor:
    return (total_N1.log() + highest_N1 - chosen_N1).squeeze(1)
