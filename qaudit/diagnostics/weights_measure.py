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

Sums over the weights of a subject, taken while its schemes quantize them.

The engine passes every group of linears and its quantized weights to an observer, so that nothing
is read for this alone. A scheme that was measured before quantizes again, without an evaluation.
If the weights of the checkpoint before are on disk, they are read in step, block by block.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, cast

import torch

from qaudit.checkpoints.stamps import folder_of
from qaudit.core.grid import fit, split_groups
from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Scheme, Shipped
from qaudit.diagnostics.case import Case, Measure
from qaudit.diagnostics.diagnostic import role_of
from qaudit.diagnostics.weights import WeightStatistics
from qaudit.engine.measure import quantize_only
from qaudit.errors import SourceError
from qaudit.model.blocks import Block, BlockModel
from qaudit.model.config import is_remote
from qaudit.support.lazy import Tensor
from qaudit.types import Checkpoint, WeightRow

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


def together(several: Iterable[RoleSums]) -> RoleSums:
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
        moved=None if a.moved is None or b.moved is None else a.moved + b.moved,
        square_before=None
        if a.square_before is None or b.square_before is None
        else a.square_before + b.square_before,
    )


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


ALWAYS = (3, 4)
"""Bits whose grids are always measured, beside those of the schemes."""

LinearKey = tuple[int, str]
"""A block, and the name of a linear in it."""


class WeightWatch:
    """Observes the weights as schemes quantize them, and adds up."""

    def __init__(self, case: Case) -> None:
        self._case = case
        # Shipped files are quantized already: their weights are never seen beside the base's.
        self._schemes = tuple(s for s in case.task.schemes if not isinstance(s, Shipped))
        self._parameters = cast(WeightStatistics, case.parameters)
        self._before = PreviousWeights(case)
        self._sums: dict[LinearKey, RoleSums] = {}
        self._moved: dict[str, dict[LinearKey, float]] = {}  # by scheme, squared perturbations

    def __call__(self, scheme: Scheme, linears: Linears, quantized: Quantized) -> None:
        moved = self._moved.setdefault(scheme.spec, {})
        for name, weight_RC in linears.weights.items():
            tensor = linears.block, name
            if tensor not in self._sums:
                before_RC = self._before.weight(*tensor)
                self._sums[tensor] = sums_of(
                    weight_RC, self._parameters, bits_of(self._schemes), before_RC
                )
            moved[tensor] = difference(quantized.weights[name], weight_RC)

    @property
    def unseen(self) -> tuple[Scheme, ...]:
        return tuple(s for s in self._schemes if s.spec not in self._moved)

    def rows(self) -> list[WeightRow]:
        roles: dict[str, list[LinearKey]] = {}
        for tensor in self._sums:
            roles.setdefault(role_of(tensor[1]), []).append(tensor)
        return [
            self._row("model", "all", tuple(self._sums)),
            *(self._row("role", role, tensors) for role, tensors in roles.items()),
            *(
                self._row("tensor", f"{block}.{name}", [(block, name)])
                for block, name in self._sums
            ),
        ]

    def _row(self, part: Any, name: str, tensors: Sequence[LinearKey]) -> WeightRow:
        sums = together(self._sums[tensor] for tensor in tensors)
        squares = {
            scheme.short: sum(self._moved[scheme.spec][tensor] for tensor in tensors)
            for scheme in self._schemes
        }
        return WeightRow(
            subject=self._case.subject.label,
            part=part,
            name=name,
            weights=sums.count,
            kurtosis=sums.kurtosis,
            outlier_share=sums.outlier_share,
            effective_range=sums.effective_range,
            grid_distance={str(bits): off for bits, off in sums.grid_distance.items()},
            perturbation=relative(squares, sums.square),
            previous=self._before.label if sums.movement is not None else None,
            movement=sums.movement,
        )

    def close(self) -> None:
        """Close the checkpoint before; if it went halfway, nothing is compared with it."""
        self._before.close()
        if self._before.checkpoint is None:
            self._sums = {
                t: replace(s, moved=None, square_before=None) for t, s in self._sums.items()
            }


def measure_weights(case: Case) -> list[WeightRow]:
    """Return the rows; schemes that were not observed quantize once more."""
    watch = cast(WeightWatch, case.observer or WeightWatch(case))
    if watch.unseen:
        quantize_only(case.task, watch.unseen, case.machine, case.progress, watch)
    watch.close()
    return watch.rows()


def bits_of(schemes: Sequence[Scheme]) -> tuple[int, ...]:
    bits = {int(getattr(scheme, "bits", ALWAYS[0])) for scheme in schemes}
    return tuple(sorted(bits.union(ALWAYS)))


class PreviousWeights:
    """The weights of the checkpoint before, one block at a time."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.checkpoint: Checkpoint | None = case.previous
        self._blocks = self._opened()
        self._block: Block | None = None

    @property
    def label(self) -> str | None:
        return None if self.checkpoint is None else self.checkpoint.label

    def weight(self, block: int, name: str) -> torch.Tensor | None:
        """Return the same linear's weight before; None where it cannot be read."""
        if self.checkpoint is None or is_remote(folder_of(self.checkpoint)):
            return None
        try:
            while self._block is None or self._block.index < block:
                self._block = next(self._blocks)
            return self._block.weight(name) if self._block.index == block else None
        except (SourceError, OSError, StopIteration, AttributeError):
            self.close()
            self.checkpoint = None  # gone, or not the same architecture
            return None

    def close(self) -> None:
        self._blocks.close()
        self._block = None

    def _opened(self) -> Generator[Block, None, None]:
        weights, machine = self._case.previous_weights(), self._case.machine
        assert weights is not None and self.checkpoint is not None
        folder = folder_of(self.checkpoint)
        yield from BlockModel(folder, weights, dtype=machine.dtype, device=machine.device).blocks()


MEASURE = Measure(measure_weights, watch=WeightWatch)
