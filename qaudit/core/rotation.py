"""A rotation in front of a linear, x R (W R)^T, which changes nothing but what is rounded.

R is orthogonal and symmetric, and closed-form for every n = 2^k m with m odd: a Walsh-Hadamard
matrix of 2^k beside a Hartley matrix of m, cas(2 pi i j / m) / sqrt(m). Its entries are at most
sqrt(2 / n) in magnitude, so that no column of what is rotated stands out. QuaRot's tables of
Hadamard matrices of 12, 20, ... 172 are not needed.

Every linear is rotated alone, which is exact for every architecture: nothing has to be folded into
what precedes. What is rounded is the same as with QuaRot's rotations, some of which are folded:

- R1, of the residual: a linear behind a pre-norm reads (x / g) R, g the norm's weight, and its
  weight is W diag(g) R, online as folded. What writes to the residual is rounded as R^T W, and
  turned back in the dense weight. Embedding and head are not rounded: rotating them, which needs
  an embedding that is not the head, changes no number.
- R2, of values: v is rounded as R^T W in each head. What o reads is rotated over all heads at once,
  as by R2 and the Hadamard matrix across heads, where both sizes are powers of two.
- R3, of queries and keys: `qaudit/core/floats.py`. R4, of what down reads: online there, too.

Norms behind sublayers (OLMo 2) have no R1 that is free: readers are rotated online, what writes is
not. A block says what can be rotated of its outputs (`qaudit/model/folds.py`).

**Transformations** in front of the linears of a block, learned on what the block returns.

    x' = (x / s) (A (x) B)        W' = (W s) (A (x) B)^-T        x' W'^T = x W^T

A (x) B is a Kronecker product whose sizes are as near to each other as the width allows, so that it
costs A + B multiplications a column. Each group of linears has its own, and begins at rotations.
`descend` runs the block with x' and W' rounded on one mini-batch a step, in turn, and lowers the
squared error of the block's output beside what the unquantized model's block returns. Roundings
pass gradients on as if they were not there. Orthogonal factors take Cayley steps, which keep them
orthogonal, by an angle that falls to zero; other parameters take Adam's, whose rate falls as a
cosine.

On all mini-batches together the result is never worse than where it started: the start is kept if
it is better. It depends on the text, the weights and the number of steps alone: nothing is drawn,
and nothing is timed. One block is in memory at a time.

Shapes: B windows, T tokens, D hidden, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache

from qaudit.core.grid import Grid, fit_searched, fit_share
from qaudit.core.linears import Inputs, Linears, MiniBatch, Quantized, Rows, WholeBlock
from qaudit.support.lazy import Tensor, torch


def rotation(n: int) -> Tensor:
    power = n & -n  # the largest power of two that divides n
    odd = n // power
    walsh = torch.ones(1, 1, dtype=torch.float64)
    while len(walsh) < power:
        walsh = torch.cat([torch.cat([walsh, walsh], 1), torch.cat([walsh, -walsh], 1)])
    k = torch.arange(odd, dtype=torch.float64)
    angle = 2 * math.pi * (torch.outer(k, k) % odd) / odd
    return torch.kron(walsh / math.sqrt(power), (angle.cos() + angle.sin()) / math.sqrt(odd))


def rotate(x: Tensor) -> Tensor:
    """Return x @ rotation(n), computed in at least float32 as two small products.

    A rotation of a * b is that of a beside that of b: a + b multiplications a column, not a * b.
    """
    n = x.shape[-1]
    a = 1 << ((n & -n).bit_length() - 1) // 2  # a power of two near the root of the largest
    wide = torch.promote_types(x.dtype, torch.float32)
    left, right = _factors(a, n // a, wide, x.device)
    turned = left @ (x.to(wide).reshape(-1, a, n // a) @ right)
    return turned.reshape(x.shape).to(x.dtype)


@lru_cache(maxsize=16)
def _factors(a: int, b: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return rotation(a).to(device, dtype), rotation(b).to(device, dtype)


def rotate_rows(weight_RC: Tensor, rows: Rows) -> Tensor:
    """Return a weight with some of its rows rotated; done twice it is the weight again."""
    turned_RC = weight_RC.clone()
    part_CR = weight_RC[rows.start : rows.stop].T
    turned_CR = rotate(part_CR.reshape(-1, rows.width)).reshape(part_CR.shape)
    turned_RC[rows.start : rows.stop] = turned_CR.T
    return turned_RC


@dataclass(frozen=True, eq=False)
class Rotated:
    """Linears behind the rotation, and what they read and write in the model.

    A norm's weight is moved into the linears behind it, so that what is rotated is the norm's
    output without it. Outputs that a block lets one rotate for nothing are rotated, too.
    """

    linears: Linears
    norm_C: Tensor | None
    rows: Mapping[str, Rows]

    def inputs(self, x: Tensor) -> Tensor:
        """Return the inputs of the rotated weights in place of x, in at least float32."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return rotate(wide if self.norm_C is None else wide / self.norm_C.to(wide.dtype))

    def outwards(self, name: str, weight_RC: Tensor) -> Tensor:
        """Rotate the rows of a weight back: what it adds is then in the model's own basis."""
        return rotate_rows(weight_RC, self.rows[name]) if name in self.rows else weight_RC


def rotated(linears: Linears) -> Linears:
    """Return linears and the second moments of their inputs behind a rotation in front of them."""
    return fused(replace(linears, norm_C=None, rows=None)).linears


def fused(linears: Linears) -> Rotated:
    """Return linears as QuaRot's rotations make them: norms moved in, outputs rotated."""
    norm_C = linears.norm_C
    if norm_C is not None:
        norm_C = torch.where(norm_C == 0, 1.0, norm_C.float())  # weights there multiply zeros
    rows = {name: axis for name, axis in (linears.rows or {}).items() if name in linears.weights}
    weights = {}
    for name, wide_RC in linears.widened():
        if norm_C is not None:
            wide_RC = wide_RC * norm_C
        wide_RC = rotate_rows(wide_RC, rows[name]) if name in rows else wide_RC
        weights[name] = rotate(wide_RC)
    inputs = linears.inputs
    if inputs is not None:
        gram_CC = inputs.gram_CC
        if norm_C is not None:
            gram_CC = gram_CC / norm_C / norm_C[:, None]
        # What is no sum of squares is not known behind the rotation.
        gram_CC = rotate(rotate(gram_CC).T.contiguous()).contiguous()
        inputs = Inputs((gram_CC + gram_CC.T) / 2, inputs.absmean_C, inputs.tokens)
    alone = replace(linears, weights=weights, inputs=inputs, fold_C=None, fold_is_norm=False)
    return Rotated(alone, norm_C, rows)


ANGLE = 0.1  # of the first Cayley step
CLIPS_FASTER = 10  # how much faster shares of ranges are learned
LARGEST_SHARE = 0.98  # of a range, to begin with: that of 1 has no gradient


class Learner:
    """What a group of linears learns."""

    free: Sequence[tuple[Tensor, float]] = ()  # parameters that take Adam's steps, and first rates
    turns: Sequence[Tensor] = ()  # orthogonal parameters

    def quantized(self) -> Quantized:
        """Return the group as rounding makes it; gradients reach the parameters."""
        raise NotImplementedError


def descend(block: WholeBlock, learners: Sequence[Learner], steps: int) -> bool:
    """Learn; return whether that is better than where it started, and not all of it undone."""
    if not (steps and len(block.batches)):
        return False
    from torch.nn.attention import SDPBackend, sdpa_kernel

    free = [parameter for learner in learners for parameter in learner.free]
    turns = [turn for learner in learners for turn in learner.turns]
    every = [*(parameter for parameter, _ in free), *turns]
    for parameter in every:
        parameter.requires_grad_(True)
    start = [parameter.detach().clone() for parameter in every]
    before = total_error(block, learners)
    groups = [{"params": [parameter], "lr": rate} for parameter, rate in free]
    adam = torch.optim.Adam(groups) if groups else None
    # Attention on a GPU sums gradients in one order then, which its fused kernels do not.
    on_gpu = every[0].device.type == "cuda"
    for step in range(steps):
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH) if on_gpu else nullcontext():
            loss = _error(block, learners, block.batches[step % len(block.batches)])
            # A sparse indexer's choice has no gradient, nor has an expert that no token reaches.
            grads = torch.autograd.grad(loss, every, materialize_grads=True)
        if not bool(torch.isfinite(loss)):
            break
        share = 1 - step / steps
        for parameter, grad in zip(every, grads, strict=True):
            parameter.grad = grad
        if adam is not None:
            for group, (_, rate) in zip(adam.param_groups, free, strict=True):
                group["lr"] = rate * (1 - math.cos(math.pi * share)) / 2
            adam.step()
        for turn in turns:
            turn.data = cayley_step(turn.data, turn.grad, ANGLE * share)
    is_better = total_error(block, learners) < before  # what is not a number never is
    for parameter, first in zip(every, start, strict=True):
        parameter.requires_grad_(False)
        parameter.data = parameter.data if is_better else first
    return is_better


def total_error(block: WholeBlock, learners: Sequence[Learner]) -> float:
    """Return the error over all mini-batches, relative to what the outputs are."""
    with torch.no_grad():
        return sum(float(_error(block, learners, batch)) for batch in block.batches)


def _error(block: WholeBlock, learners: Sequence[Learner], batch: MiniBatch) -> Tensor:
    out_BTD = block.run(batch.hidden_BTD, [learner.quantized() for learner in learners])
    target_ND = batch.target_BTD[batch.valid_BT].float()
    return (out_BTD[batch.valid_BT].float() - target_ND).square().sum() / target_ND.square().sum()


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is learned, and what is rounded meanwhile."""

    act: int | None = 4  # bits of tokens; None: not rounded
    bits: int | None = 4  # of weights
    orthogonal: bool
    scaling: bool
    clipping: bool
    rate: float = 5e-3


@dataclass(frozen=True, eq=False)
class Transform:
    """A Kronecker product behind a scale of each column, and shares of ranges."""

    left_AA: Tensor
    right_BB: Tensor
    scale_C: Tensor
    token_clip: Tensor = field(repr=False)
    row_clips: Mapping[str, Tensor] = field(repr=False)  # (R, 1) of each linear
    orthogonal: bool = True

    @classmethod
    def start(
        cls, scale_C: Tensor, weights: Mapping[str, Tensor], bits: int, token_clip: float = 1.0
    ) -> Transform:
        """Return rotations, and the best shares of the ranges of rotated weights."""
        columns = len(scale_C)
        first = max(a for a in range(1, math.isqrt(columns) + 1) if columns % a == 0)
        left_AA, right_BB = (rotation(n).to(scale_C) for n in (first, columns // first))
        turn = cls(left_AA, right_BB, scale_C, scale_C.new_full((), token_clip), {})
        clips = {n: best_shares(turn.of_weights(_wide(w)), bits) for n, w in weights.items()}
        return replace(turn, row_clips=clips)

    def of_inputs(self, x: Tensor) -> Tensor:
        return _kronecker(x / self.scale_C, self.left_AA, self.right_BB)

    def of_weights(self, weight_RC: Tensor) -> Tensor:
        factors = (self.left_AA, self.right_BB)
        if not self.orthogonal:
            factors = (torch.linalg.inv(self.left_AA).T, torch.linalg.inv(self.right_BB).T)
        return _kronecker(weight_RC * self.scale_C, *factors)

    def of_gram(self, gram_CC: Tensor) -> Tensor:
        turned_CC = self.of_inputs(self.of_inputs(gram_CC).T.contiguous())
        return (turned_CC + turned_CC.T) / 2

    def nbits(self, *, scaling: bool) -> int:
        """Count what a file holds of it, in 16 bits each; scales where they are not all 1."""
        parts = (self.left_AA, self.right_BB, *([self.scale_C] if scaling else []))
        return 16 * sum(part.numel() for part in parts)


class LearningCourse(Learner):
    """The transformation of a group on its way."""

    def __init__(self, linears: Linears, start: Transform, goal: Goal) -> None:
        self._start, self._goal = start, goal
        self._weights = {name: _wide(weight) for name, weight in linears.weights.items()}
        self._factors = [start.left_AA.clone(), start.right_BB.clone()]
        self._log_scale_C = torch.zeros_like(start.scale_C)
        # Shares through a sigmoid, as FlatQuant's.
        self._token_clip, *rows = (
            torch.logit(clip.clamp(max=LARGEST_SHARE))
            for clip in (start.token_clip, *start.row_clips.values())
        )
        self._row_clips = dict(zip(start.row_clips, rows, strict=True))
        rate = goal.rate
        self.turns = self._factors if goal.orthogonal else ()
        self.free = [] if goal.orthogonal else [(factor, rate) for factor in self._factors]
        self.free += [(self._log_scale_C, rate)] if goal.scaling else []
        if goal.clipping:
            clips = [] if goal.bits is None else rows
            clips += [] if goal.act is None else [self._token_clip]
            self.free += [(clip, CLIPS_FASTER * rate) for clip in clips]

    def transform(self) -> Transform:
        left_AA, right_BB = self._factors
        moved = replace(
            self._start,
            left_AA=left_AA,
            right_BB=right_BB,
            scale_C=self._start.scale_C * self._log_scale_C.exp(),
            orthogonal=self._goal.orthogonal,
        )
        if not self._goal.clipping:
            return moved
        rows = {name: torch.sigmoid(clip) for name, clip in self._row_clips.items()}
        return replace(moved, token_clip=torch.sigmoid(self._token_clip), row_clips=rows)

    def quantized(self) -> Quantized:
        now, goal = self.transform(), self._goal
        weights = {name: now.of_weights(weight_RC) for name, weight_RC in self._weights.items()}
        if goal.bits is not None:
            for name, weight_RC in weights.items():
                share_R1 = now.row_clips[name]
                grid = fit_share(weight_RC, goal.bits, share_R1, scale_dtype="bf16")
                weights[name] = snap_through(weight_RC, grid)

        def inputs(x: Tensor) -> Tensor:
            turned = now.of_inputs(x.float())
            if goal.act is not None:
                turned = snap_through(turned, fit_share(turned, goal.act, now.token_clip))
            return turned.to(x.dtype)

        return Quantized(weights, 0, inputs=inputs)


def learn(
    block: WholeBlock, start: Callable[[Linears], Transform], goal: Goal, steps: int
) -> list[Transform]:
    starts = [start(linears) for linears in block.groups]
    courses = [LearningCourse(*pair, goal) for pair in zip(block.groups, starts, strict=True)]
    is_better = descend(block, courses, steps)
    return [course.transform() for course in courses] if is_better else starts


def cayley_step(turn_BB: Tensor, grad_BB: Tensor | None, angle: float) -> Tensor:
    """Rotate an orthogonal matrix against its gradient, by an angle, and keep it orthogonal."""
    assert grad_BB is not None
    skew_BB = grad_BB @ turn_BB.T
    skew_BB = skew_BB - skew_BB.T
    norm = torch.linalg.matrix_norm(skew_BB, 2) if skew_BB.numel() > 1 else skew_BB.new_zeros(())
    if not float(norm) > 0:
        return turn_BB
    skew_BB = skew_BB * (angle / 2 / norm)
    identity_BB = torch.eye(len(skew_BB)).to(skew_BB)
    moved_BB: Tensor = torch.linalg.solve(identity_BB + skew_BB, (identity_BB - skew_BB) @ turn_BB)
    return moved_BB


def best_shares(weight_RC: Tensor, bits: int) -> Tensor:
    """Return the share of the range of each row that leaves the least error."""
    best = fit_searched(weight_RC, bits, dim=-1)
    return (best.scale / fit_share(weight_RC, bits).scale).clamp(max=1)


def snap_through(x: Tensor, grid: Grid) -> Tensor:
    """Round to a grid; gradients pass what is rounded."""
    inside = (x / grid.scale).clamp(grid.low, grid.high)
    return (inside + (inside.round() - inside).detach()) * grid.scale


def _wide(weight_RC: Tensor) -> Tensor:
    """Return a weight in float32, in a layout that does not depend on the caller's."""
    return weight_RC.detach().float().contiguous()


def _kronecker(x: Tensor, left_AA: Tensor, right_BB: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (len(left_AA), len(right_BB)))
    return torch.flatten(left_AA.T @ (blocks @ right_BB), -2)
