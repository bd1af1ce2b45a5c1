"""How far a stream's predictions are from those of full precision, token by token.

Full precision's logits are prepared once (`Reference.of`) and every stream is compared with them.
With z the logits, P full precision, Q the stream and d = z_Q - z_P,

    KL(P || Q) = log sum e^z_Q - log sum e^z_P - sum_i P_i d_i,

where the first term is that of the loss, so that comparing costs a difference and a product more.
Sums in float32 are right to a few 1e-7: the result is to 5e-7 (1 + |sum P d|), measured in
tests/core/test_fidelity.py. Rows where that could be above 0.5 % of it are computed again as

    KL(P || Q) = sum_i P_i (e^v_i - 1 - v_i), v = log Q - log P,

because sum P e^v = sum Q = 1. Every term is at least 0, so that KL is, and small ones keep their
digits in float32: the logits are subtracted first, which is nearly exact where they are close,
and an error d of the logarithms moves the result by d^2 / 2 only. Where no |v| reaches 1/32 a term
is v^2 / 2 + v^3 / 6, to 1e-4 of itself, in half of the time. Rows where neither is finite (a
token that P rules out, a v beyond the range of float32) are computed by the definition, in
float64. A GPU takes the exact form of v for all rows.

The likeliest token is the same where the stream gives full precision's likeliest token no less
than any other: a tie agrees.

Rows are processed a few at a time (`core/rows.py`). A row's result does not depend on how many are
processed at once.

Shapes: N rows (tokens), V vocabulary, S rows of small divergence, F of them not near.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qaudit.core.rows import LOG2_E, row_parts
from qaudit.core.sampling import drawn_log_probability
from qaudit.types import RolloutChoices

if TYPE_CHECKING:
    from torch import Tensor

_NEAR = 1 / 32
_TRUSTED = 1e-4  # a divergence above this times 1 + |sum P d|, 200 times the rounding
CHOSEN, TIE = 1, 2
"""Of a token that a stream would write itself; and of one that it wrote, and now would not by
rounding alone, as batches of another shape round otherwise."""
TIED = 2  # units of rounding of the highest logit that such tokens are below it
_GPU_HEAD_ELEMENTS, _GPU_HEAD_ROWS = 2**26, 4096


def gpu_head_rows(vocabulary: int) -> int:
    """Return how many rows of logits a GPU has in memory at once."""
    return min(max(_GPU_HEAD_ELEMENTS // vocabulary, 16), _GPU_HEAD_ROWS)


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
        import torch

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

    logits_NV: Tensor  # as the model returns them
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
        import torch

        weights_NV = torch.empty_like(logits_NV, dtype=torch.float32)
        parts = []
        for part in row_parts(logits_NV):
            z_NV, e_NV = logits_NV[part].float(), weights_NV[part]
            highest_N1, top_N1 = z_NV.max(1, keepdim=True)
            total_N1 = _exponentials(z_NV, highest_N1, out=e_NV).sum(1, keepdim=True)
            chosen_N1 = z_NV.gather(1, targets_N[part, None])
            parts.append((highest_N1, total_N1, top_N1, chosen_N1))
        highest_N1, total_N1, top_N1, chosen_N1 = map(torch.cat, zip(*parts, strict=True))
        nll_N = _nll(total_N1, highest_N1, chosen_N1)
        return cls(logits_NV, weights_NV, highest_N1, total_N1, top_N1, nll_N)

    def compare(self, logits_NV: Tensor, targets_N: Tensor) -> ComparedRows:
        """Return the loss and the divergence of each row of a stream with the same vocabulary."""
        import torch

        parts = [
            self._compare(part, logits_NV[part].float(), targets_N[part])
            for part in row_parts(logits_NV)
        ]
        return ComparedRows(*map(torch.cat, zip(*parts, strict=True)))

    def _compare(
        self, part: slice, q_NV: Tensor, targets_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        highest_N1 = q_NV.amax(1, keepdim=True)
        work_NV = _exponentials(q_NV, highest_N1)
        total_N1 = work_NV.sum(1, keepdim=True)
        nll_N = _nll(total_N1, highest_N1, q_NV.gather(1, targets_N[:, None]))
        same_N = (q_NV.gather(1, self.top_N1[part]) == highest_N1).squeeze(1)
        # In float64: the two are close, and each is rounded already.
        shift_N1 = highest_N1.double() - self.highest_N1[part].double()
        shift_N1 += (total_N1.double() / self.total_N1[part].double()).log()
        if q_NV.device.type == "cpu":
            p_NV = self.logits_NV[part].float()  # two passes are faster than one of two dtypes
            torch.sub(q_NV, p_NV, out=work_NV)
            return nll_N, self._divergence(part, q_NV, work_NV, shift_N1), same_N
        # To be told which rows are small a GPU would wait, and it is memory that takes its time.
        torch.sub(q_NV, self.logits_NV[part], out=work_NV)
        kl_N = _excess(work_NV.sub_(shift_N1.float()), self.weights_NV[part])
        kl_N = (kl_N / self.total_N1[part].squeeze(1)).clamp_(min=0)
        return nll_N, _finite(kl_N, self.logits_NV[part], q_NV), same_N

    def _divergence(self, part: slice, q_NV: Tensor, moves_NV: Tensor, shift_N1: Tensor) -> Tensor:
        """Return the divergence of rows whose logits moved by so much."""
        import torch

        moved_N1 = (moves_NV * self.weights_NV[part]).sum(1, keepdim=True).double()
        moved_N1 /= self.total_N1[part]
        kl_N1 = shift_N1 - moved_N1
        trusted_N1 = torch.isfinite(kl_N1) & (kl_N1 > _TRUSTED * (1 + moved_N1.abs()))
        kl_N, small_S = kl_N1.squeeze(1).float(), (~trusted_N1.squeeze(1)).nonzero().squeeze(1)
        if len(small_S):
            v_NV = moves_NV.sub_(shift_N1.float())
            kl_N[small_S] = self._small(part, small_S, q_NV, v_NV)
        return kl_N

    def _small(self, part: slice, small_S: Tensor, q_NV: Tensor, v_NV: Tensor) -> Tensor:
        """Return the divergence of rows where it is small, or where it is not finite."""
        tensors = v_NV, self.weights_NV[part], self.total_N1[part]
        # Two at least: of a single row threads would split the sum, which then ends otherwise.
        rows_S = small_S if len(small_S) > 1 or len(q_NV) == 1 else small_S.repeat(2)
        if len(small_S) < len(q_NV):
            tensors = v_NV[rows_S], tensors[1][rows_S], tensors[2][rows_S]
        v_SV, weights_SV, total_S1 = tensors
        terms_SV = (v_SV * weights_SV).mul_(v_SV)
        kl_S = terms_SV.sum(1) / 2
        kl_S += terms_SV.mul_(v_SV).sum(1) / 6
        # Two passes: a norm, or `aminmax`, along a dimension takes 20 times as long on a CPU.
        near_S = (v_SV.amax(1) < _NEAR) & (v_SV.amin(1) > -_NEAR)
        far_F = (~near_S).nonzero().squeeze(1)
        if len(far_F):
            far_F = far_F if len(far_F) > 1 else far_F.repeat(2)
            kl_S[far_F] = _excess(v_SV[far_F], weights_SV[far_F])
        kl_S = (kl_S / total_S1.squeeze(1)).clamp_(min=0)
        return _finite(kl_S, self.logits_NV[part], q_NV, rows_S)[: len(small_S)]


def _excess(v_NV: Tensor, weights_NV: Tensor) -> Tensor:
    """Return the sums of e^v - 1 - v, which near 1e-7 is rounding of either sign."""
    import torch

    return torch.expm1(v_NV).sub_(v_NV).mul_(weights_NV).sum(1)


def _finite(
    kl_S: Tensor, p_NV: Tensor, q_NV: Tensor, rows_S: Tensor | slice = slice(None)
) -> Tensor:
    """Return divergences of some rows, by the definition where they are not finite."""
    import torch

    odd_S = ~torch.isfinite(kl_S)
    if bool(odd_S.any()):
        kl_S[odd_S] = divergence(p_NV[rows_S][odd_S], q_NV[rows_S][odd_S]).float()
    return kl_S


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
    import torch

    parts = []
    for part in row_parts(logits_NV):
        z_NV = logits_NV[part].float()
        highest_N1 = z_NV.amax(1, keepdim=True)
        total_N1 = _exponentials(z_NV, highest_N1).sum(1, keepdim=True)
        parts.append(_nll(total_N1, highest_N1, z_NV.gather(1, targets_N[part, None])))
    return torch.cat(parts)


def divergence(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """Return KL(P || Q) of rows of logits by its definition in float64."""
    import torch

    logp_NV, logq_NV = (torch.log_softmax(z_NV.double(), -1) for z_NV in (p_NV, q_NV))
    terms_NV = logp_NV.exp() * (logp_NV - logq_NV)
    # What P rules out adds nothing, whatever Q makes of it.
    return torch.where(logp_NV == -torch.inf, 0.0, terms_NV).sum(-1)


def _exponentials(z_NV: Tensor, highest_N1: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return e^(z - highest)."""
    import torch

    return torch.sub(z_NV, highest_N1, out=out).mul_(LOG2_E).exp2_()


def _nll(total_N1: Tensor, highest_N1: Tensor, chosen_N1: Tensor) -> Tensor:
    return (total_N1.log() + highest_N1 - chosen_N1).squeeze(1)
