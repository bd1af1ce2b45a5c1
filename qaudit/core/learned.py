"""Transformations in front of the linears of a block, learned on what the block returns.

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
from typing import Protocol

from qaudit.core.grid import Grid, fit_searched, fit_share
from qaudit.core.linears import Linears, MiniBatch, Quantized, WholeBlock
from qaudit.core.rotation import rotation
from qaudit.support.lazy import Tensor, torch

ANGLE = 0.1  # of the first Cayley step
CLIPS_FASTER = 10  # how much faster shares of ranges are learned
LARGEST_SHARE = 0.98  # of a range, to begin with: that of 1 has no gradient


class Learner(Protocol):
    """What a group of linears learns."""

    @property
    def free(self) -> Sequence[tuple[Tensor, float]]:
        """Parameters that take Adam's steps, and their first rates."""

    @property
    def turns(self) -> Sequence[Tensor]:
        """Orthogonal parameters."""

    def quantized(self) -> Quantized:
        """Return the group as rounding makes it; gradients reach the parameters."""


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
    error: Tensor = (out_BTD[batch.valid_BT].float() - target_ND).square().sum()
    return error / target_ND.square().sum()


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
        turned = {name: turn.of_weights(_wide(weight)) for name, weight in weights.items()}
        return replace(
            turn, row_clips={n: best_shares(weight, bits) for n, weight in turned.items()}
        )

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


class LearningCourse:
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

    @property
    def free(self) -> Sequence[tuple[Tensor, float]]:
        rate = self._goal.rate
        free = [] if self._goal.orthogonal else [(factor, rate) for factor in self._factors]
        free += [(self._log_scale_C, rate)] if self._goal.scaling else []
        if self._goal.clipping:
            clips = [] if self._goal.bits is None else [*self._row_clips.values()]
            clips += [] if self._goal.act is None else [self._token_clip]
            free += [(clip, CLIPS_FASTER * rate) for clip in clips]
        return free

    @property
    def turns(self) -> Sequence[Tensor]:
        return self._factors if self._goal.orthogonal else ()

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
        if (bits := goal.bits) is not None:
            weights = {
                name: snap_through(
                    weight_RC, fit_share(weight_RC, bits, now.row_clips[name], scale_dtype="bf16")
                )
                for name, weight_RC in weights.items()
            }

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
    if not descend(block, courses, steps):
        return starts
    return [course.transform() for course in courses]


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
    rounded: Tensor = (inside + (inside.round() - inside).detach()) * grid.scale
    return rounded


def _wide(weight_RC: Tensor) -> Tensor:
    """Return a weight in float32, in a layout that does not depend on the caller's."""
    return weight_RC.detach().float().contiguous()


def _kronecker(x: Tensor, left_AA: Tensor, right_BB: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (len(left_AA), len(right_BB)))
    turned: Tensor = (left_AA.T @ (blocks @ right_BB)).flatten(-2)
    return turned
