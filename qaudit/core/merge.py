"""What a merge is: a frozen dataclass with one verb, as a scheme is.

Its fields are its parameters, its docstring's first line its description, `version` part of
every cache key. A file dropped into `core/merges/` is registered by being there
(`core/registry.py`), and the contract tests run on it with no other edit.

The verb sees one tensor of every member at a time, in the members' order, because weights
are merged while they are streamed: no soup is ever in memory or on disk as a whole. Before
that, and without torch, a merge gives the weight of each candidate: a window takes the
latest few and leaves the others, with a weight of zero.

Sums run in double precision and in the members' order, so that a soup of bf16 members does
not lose what averaging is for, and the same members give the same bits on every run. One
slice at a time is widened; a whole embedding matrix in double precision would be the largest
thing in memory. Inner products add up slices short enough that no library shares one between
threads, exactly (`math.fsum`): their bits do not depend on the number of threads either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.scheme import Parameters
from qaudit.errors import SourceError, UsageError
from qaudit.support.lazy import Tensor, torch

Weights = Sequence[float]
Counted = tuple[Weights, float]
"""What members count, and what their sum is divided by."""
SLICE = 1 << 20
SERIAL = 1 << 15  # torch's own grain: a reduction over no more than this stays on one thread


@dataclass(frozen=True, kw_only=True)
class Merge(Parameters):
    """Base of every merge."""

    fewest: ClassVar[int] = 2
    most: ClassVar[int | None] = None
    follows_a_run: ClassVar[bool] = False
    """Whether the merge means something over a whole run, with no members named."""

    def merge(self, tensors: Sequence[Tensor], weights: Weights) -> Tensor:
        """Merge one tensor of every member, into the dtype of the first."""
        if not tensors or len(tensors) != len(weights):
            raise UsageError(
                f"{len(tensors)} members and {len(weights)} weights do not make a soup",
                hint="give every member one weight",
            )
        if sum(weights) == 0:
            raise UsageError("the weights of a soup sum to zero", hint="give positive weights")
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            raise SourceError(
                f"members of a soup differ in shape: {sorted(shapes)}",
                hint="average checkpoints of one architecture",
            )
        first = tensors[0]
        if len(tensors) == 1:
            return first.clone()
        coefficients, divisor = self.coefficients(tensors, weights)
        merged = torch.empty(first.shape, dtype=first.dtype, device=first.device)
        slices = zip(*(t.reshape(-1).split(SLICE) for t in tensors), strict=True)
        for target, parts in zip(merged.view(-1).split(SLICE), slices, strict=True):
            wide = parts[0].double() * coefficients[0]
            for part, coefficient in zip(parts[1:], coefficients[1:], strict=True):
                wide.add_(part.double(), alpha=coefficient)
            target.copy_(wide.div_(divisor))
        return merged

    def coefficients(self, tensors: Sequence[Tensor], weights: Weights) -> Counted:
        return weights, sum(weights)

    def shares(self, steps: Sequence[int | None]) -> tuple[float, ...]:
        return (1 / len(steps),) * len(steps)

    def accept(self, weights: Weights) -> None:
        """Refuse weights of a recipe that the merge does not take."""
        raise UsageError(
            f"`{self.name}` takes no weights", hint="weights are for `weighted`: `0.9*A+0.1*B`"
        )


def inner(a: Tensor, b: Tensor, origin: Tensor | None = None) -> float:
    """Return the inner product of two tensors, or of what leads to them from `origin`."""
    parts = [t.reshape(-1).split(SERIAL) for t in ((a, b) if origin is None else (a, b, origin))]
    sums = []
    for slices in zip(*parts, strict=True):
        wide = [part.double() for part in slices]
        if origin is not None:
            wide = [wide[0] - wide[2], wide[1] - wide[2]]
        sums.append(float((wide[0] * wide[1]).sum()))
    return math.fsum(sums)
