"""A transformation in front of a group of linears, learned on what the group computes.

    x' = (x / s) (A (x) B)        W' = (W s) (A (x) B)^-T        x' W'^T = x W^T

A (x) B is a Kronecker product whose sizes are as near to each other as the width allows, so that it
costs A + B multiplications a column. Starting at rotations, `steps` steps lower the squared error
of x' W'^T, relative to what full precision gives, with x' and W' rounded. Roundings pass gradients
on as if they were not there. Orthogonal factors take Cayley steps, which keep them orthogonal, by
an angle that falls to zero; other parameters take Adam's, whose rate falls as a cosine.

The result is that of the best step, the first one included: on the sample it is never worse than
where it started. It depends on the sample, the weights and the number of steps alone: nothing is
drawn, and nothing is timed. One group is in memory at a time; of its rows at most 1,024 count.

Shapes: T tokens, R rows, C columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from qaudit.core.rotation import rotation

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_ROWS = 1024
ANGLE = 0.1  # of the first Cayley step
CLIPS_FASTER = 10  # how much faster shares of ranges are learned


@dataclass(frozen=True)
class Goal:
    """What is learned, and what is rounded meanwhile."""

    steps: int
    act: int | None  # bits of tokens; None: not rounded
    bits: int | None  # of weights
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
    weight_clip: Tensor = field(repr=False)

    @classmethod
    def start(cls, scale_C: Tensor) -> Transform:
        """Return rotations alone."""
        columns = len(scale_C)
        left = max(a for a in range(1, math.isqrt(columns) + 1) if columns % a == 0)
        one = scale_C.new_ones(())
        left_AA, right_BB = (rotation(n).to(scale_C) for n in (left, columns // left))
        return cls(left_AA, right_BB, scale_C, one, one)

    def of_inputs(self, x: Tensor) -> Tensor:
        return _kronecker(x / self.scale_C, self.left_AA, self.right_BB)

    def of_weights(self, weight_RC: Tensor) -> Tensor:
        import torch

        inverse = (torch.linalg.inv(one).T for one in (self.left_AA, self.right_BB))
        return _kronecker(weight_RC * self.scale_C, *inverse)

    def of_gram(self, gram_CC: Tensor) -> Tensor:
        turned_CC = self.of_inputs(self.of_inputs(gram_CC).T.contiguous())
        return (turned_CC + turned_CC.T) / 2

    def nbits(self, *, scaling: bool) -> int:
        """Count what a file holds of it, in 16 bits each; scales where they are not all 1."""
        parts = (self.left_AA, self.right_BB, *([self.scale_C] if scaling else []))
        return 16 * sum(one.numel() for one in parts)


def learn(sample_TC: Tensor, weight_RC: Tensor, start: Transform, goal: Goal) -> Transform:
    """Return the transformation of the best step."""
    import torch

    with torch.enable_grad():
        rows = -(-len(weight_RC) // LARGEST_ROWS)
        weight_RC = weight_RC[::rows].detach().clone()
        exact_TR = sample_TC @ weight_RC.T
        size = exact_TR.square().sum()
        if not float(size) > 0:
            return start
        best, smallest = start, math.inf
        course = _Course(start, goal)
        for step in range(goal.steps + 1):
            now = course.transform()
            loss = (_product(now, sample_TC, weight_RC, goal) - exact_TR).square().sum() / size
            value = float(loss.detach())
            if value < smallest:  # what is not a number never is
                best, smallest = _detached(now), value
            if step < goal.steps:
                loss.backward()
                course.step(step)
        return best


def _detached(one: Transform) -> Transform:
    return Transform(*(getattr(one, name).detach().clone() for name in _NAMES))


_NAMES = ("left_AA", "right_BB", "scale_C", "token_clip", "weight_clip")


class _Course:
    """The parameters on their way."""

    def __init__(self, start: Transform, goal: Goal) -> None:
        import torch

        self._start, self._goal = start, goal
        self.turns = [one.clone().requires_grad_() for one in (start.left_AA, start.right_BB)]
        self.log_scale_C = torch.zeros_like(start.scale_C).requires_grad_(goal.scaling)
        # Shares through a sigmoid, from 0.98 on, as FlatQuant's.
        self.clips = [
            start.scale_C.new_full((), 4.0).requires_grad_(goal.clipping) for _ in range(2)
        ]
        free = [] if goal.orthogonal else [*self.turns]
        free += [self.log_scale_C] if goal.scaling else []
        groups = [{"params": free, "lr": goal.rate}] if free else []
        if goal.clipping:
            groups.append({"params": self.clips, "lr": CLIPS_FASTER * goal.rate})
        self._adam = torch.optim.Adam(groups) if groups else None
        rates = [CLIPS_FASTER * goal.rate] if goal.clipping else []
        self._rates = [goal.rate, *rates] if free else rates

    def transform(self) -> Transform:
        import torch

        scale_C = self._start.scale_C * self.log_scale_C.exp()
        clips = (torch.sigmoid(one) for one in self.clips)
        moved = replace(self._start, left_AA=self.turns[0], right_BB=self.turns[1], scale_C=scale_C)
        if not self._goal.clipping:
            return moved
        token_clip, weight_clip = clips
        return replace(moved, token_clip=token_clip, weight_clip=weight_clip)

    def step(self, number: int) -> None:
        import torch

        left = 1 - number / self._goal.steps
        if self._adam is not None:
            for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
                group["lr"] = rate * (1 + math.cos(math.pi * (1 - left))) / 2
            self._adam.step()
            self._adam.zero_grad()
        with torch.no_grad():
            for turn in self.turns if self._goal.orthogonal else ():
                turn.copy_(cayley_step(turn, turn.grad, ANGLE * left))
        for turn in self.turns:
            turn.grad = None


def cayley_step(turn_BB: Tensor, grad_BB: Tensor | None, angle: float) -> Tensor:
    """Rotate an orthogonal matrix against its gradient, by an angle, and keep it orthogonal."""
    import torch

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


def round_through(x: Tensor, bits: int, clip: Tensor) -> Tensor:
    """Round rows on symmetric grids of integers; gradients pass what is rounded."""
    import torch

    top = 2 ** (bits - 1) - 1
    scale = clip * x.abs().amax(-1, keepdim=True) / top
    steps = x / torch.where(scale == 0, 1.0, scale)
    inside = steps.clamp(-top - 1, top)
    rounded: Tensor = (inside + (inside.round() - inside).detach()) * scale
    return rounded


def _product(now: Transform, sample_TC: Tensor, weight_RC: Tensor, goal: Goal) -> Tensor:
    x_TC, turned_RC = now.of_inputs(sample_TC), now.of_weights(weight_RC)
    if goal.act is not None:
        x_TC = round_through(x_TC, goal.act, now.token_clip)
    if goal.bits is not None:
        turned_RC = round_through(turned_RC, goal.bits, now.weight_clip)
    return x_TC @ turned_RC.T


def _kronecker(x: Tensor, left_AA: Tensor, right_BB: Tensor) -> Tensor:
    """Return x (A (x) B) as two small products."""
    blocks = x.unflatten(-1, (len(left_AA), len(right_BB)))
    turned: Tensor = (left_AA.T @ (blocks @ right_BB)).flatten(-2)
    return turned
