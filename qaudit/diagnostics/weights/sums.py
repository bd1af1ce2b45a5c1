"""What weights look like to a quantizer: tails, ranges, and distances to a grid.

Kurtosis     of all weights of a tensor, in excess of the 3 of a normal distribution: how much
             of the variance comes from a few large weights.
Outliers     the share beyond six standard deviations from the mean. Of normal weights two in a
             billion are there, so that any larger share is a tail and not a matter of
             counting; it is also where LLM.int8 (2208.07339) puts its line between inputs.
Range        largest minus smallest weight of a quantization group, over the standard deviation
             of that group: how many deviations 2^b - 1 steps have to span.
Distance     of a weight to the nearest point of the grid that rounding to nearest lays over its
             group, in steps of that grid, as a root mean square: sqrt(1/12) = 0.289 where
             weights know nothing of a grid, less where they have moved to it.

Moments are sums in float64 over the whole tensor: the mean first, then powers of what is left,
which loses nothing to cancellation. A tensor is reduced to sums, and those of several
tensors are put together exactly (Pebay, SAND2008-6212), so that a role and a model are not means
of means. Given up: one reading of each tensor instead of three; it is in memory anyway.

Shapes: R rows, C columns, G groups, K columns of one group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from qaudit.core.grid import fit, split_groups
from qaudit.diagnostics.weights.parameters import WeightStatistics
from qaudit.support.lazy import Tensor

_AT_ONCE = 2**20
"""Weights that are computed with in float64 at a time."""


@dataclass(frozen=True)
class RoleSums:
    """Sums over weights; every number of a row follows from these."""

    count: int
    mean: float
    second: float  # sum of (w - mean)^2, and so on
    third: float
    fourth: float
    outliers: int
    ranges: float  # sum over groups of range / deviation
    groups: int  # that have a deviation
    square: float  # sum of w^2
    grid: dict[int, float] = field(default_factory=dict)  # bits -> sum of squared distances
    moved: float | None = None  # sum of squared differences from the weights before
    square_before: float | None = None

    @property
    def kurtosis(self) -> float | None:
        """Excess kurtosis; None where all weights are equal."""
        return self.count * self.fourth / self.second**2 - 3 if self.second > 0 else None

    @property
    def outlier_share(self) -> float:
        return self.outliers / self.count

    @property
    def effective_range(self) -> float | None:
        return self.ranges / self.groups if self.groups else None

    @property
    def grid_distance(self) -> dict[int, float]:
        """By bits, the root mean square distance to the grid, in steps."""
        return {bits: math.sqrt(total / self.count) for bits, total in self.grid.items()}

    @property
    def movement(self) -> float | None:
        """The norm of the difference from the weights before, over the norm of those."""
        if self.moved is None or not self.square_before:
            return None
        return math.sqrt(self.moved / self.square_before)


def sums_of(
    weight_RC: Tensor,
    parameters: WeightStatistics,
    bits: Sequence[int],
    before_RC: Tensor | None = None,
) -> RoleSums:
    count = weight_RC.numel()
    mean = sum(float(part.sum()) for part in _double(weight_RC)) / count
    second, third, fourth = 0.0, 0.0, 0.0
    for part in _double(weight_RC):
        rest = part - mean
        squares = rest * rest
        second += float(squares.sum())
        third += float((squares * rest).sum())
        fourth += float((squares * squares).sum())
    beyond = parameters.outlier * math.sqrt(second / count)
    far = sum(int(((p - mean).abs() > beyond).sum()) for p in _double(weight_RC)) if second else 0
    ranges, groups = _ranges(weight_RC, parameters.group)
    return RoleSums(
        count=count,
        mean=mean,
        second=second,
        third=third,
        fourth=fourth,
        outliers=far,
        ranges=ranges,
        groups=groups,
        square=square_of(weight_RC),
        grid={b: _off_grid(weight_RC, b, parameters) for b in bits},
        moved=None if before_RC is None else difference(weight_RC, before_RC),
        square_before=None if before_RC is None else square_of(before_RC),
    )


def together(several: Sequence[RoleSums]) -> RoleSums:
    """Put the sums of several tensors together; what one of them lacks, all of them lack."""
    return reduce(_joined, several)


def _joined(a: RoleSums, b: RoleSums) -> RoleSums:
    count, delta = a.count + b.count, b.mean - a.mean
    share = delta / count
    cross = a.count * b.count * delta
    return RoleSums(
        count=count,
        mean=a.mean + b.count * share,
        second=a.second + b.second + cross * share,
        third=a.third
        + b.third
        + cross * (a.count - b.count) * share**2
        + 3 * share * (a.count * b.second - b.count * a.second),
        fourth=a.fourth
        + b.fourth
        + cross * (a.count**2 - a.count * b.count + b.count**2) * share**3
        + 6 * share**2 * (a.count**2 * b.second + b.count**2 * a.second)
        + 4 * share * (a.count * b.third - b.count * a.third),
        outliers=a.outliers + b.outliers,
        ranges=a.ranges + b.ranges,
        groups=a.groups + b.groups,
        square=a.square + b.square,
        grid={bits: a.grid[bits] + b.grid[bits] for bits in a.grid if bits in b.grid},
        moved=_both(a.moved, b.moved),
        square_before=_both(a.square_before, b.square_before),
    )


def _both(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def square_of(weight_RC: Tensor) -> float:
    """Return the squared norm, added up in float64."""
    return sum(float((part * part).sum()) for part in _double(weight_RC))


def difference(weight_RC: Tensor, other_RC: Tensor) -> float:
    """Return the squared norm of a difference, added up in float64."""
    pairs = zip(_double(weight_RC), _double(other_RC.to(weight_RC.device)), strict=True)
    return sum(float(((a - b) ** 2).sum()) for a, b in pairs)


def relative(squares: Mapping[str, float], norm: float) -> dict[str, float]:
    """Return norms over the norm of the weights, from squares; none where all weights are zero."""
    return {name: math.sqrt(square / norm) for name, square in squares.items()} if norm else {}


def _double(weight_RC: Tensor) -> Iterator[Tensor]:
    rows = max(1, _AT_ONCE // max(1, weight_RC.shape[1]))
    for start in range(0, weight_RC.shape[0], rows):
        yield weight_RC[start : start + rows].double()


def _ranges(weight_RC: Tensor, group: int) -> tuple[float, int]:
    total, count = 0.0, 0
    for rows_RC in _double(weight_RC):
        for part_RGK in split_groups(rows_RC, group):
            deviation_RG = part_RGK.std(-1, correction=0)
            some_RG = deviation_RG > 0
            range_RG = part_RGK.amax(-1) - part_RGK.amin(-1)
            total += float((range_RG[some_RG] / deviation_RG[some_RG]).sum())
            count += int(some_RG.sum())
    return total, count


def _off_grid(weight_RC: Tensor, bits: int, parameters: WeightStatistics) -> float:
    """Add up squared distances to the grid of each group, in its steps."""
    total = 0.0
    for rows_RC in _double(weight_RC):
        for part_RGK in split_groups(rows_RC, parameters.group):
            grid = fit(part_RGK, bits, symmetric=parameters.sym, dim=-1)
            steps_RGK = (part_RGK - grid.snap(part_RGK)) / grid.scale
            total += float((steps_RGK * steps_RGK).sum())
    return total
