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
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

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
from qaudit.types import WeightRow

_AT_ONCE = 2**20
"""Weights that are computed with in float64 at a time."""


@dataclass(frozen=True)
class WeightSums:
    """Sums over weights; every number of a row follows from these."""

    count: int
    mean: float
    second: float  # sum of (w - mean)^2, and so on
    third: float
    fourth: float
    grid: dict[int, float]  # bits -> sum of squared distances
    totals: dict[str, float]
    """Numbers of outliers and of groups that have a deviation, sums of range / deviation over
    those groups, of w^2, and of squares of the weights before and of differences from them."""

    def columns(self) -> dict[str, Any]:
        """Return columns of a row; None where all weights are equal, or none were before."""
        totals = self.totals
        before = totals.get("square_before")
        return {
            "weights": self.count,
            "kurtosis": self.count * self.fourth / self.second**2 - 3 if self.second > 0 else None,
            "outlier_share": totals["outliers"] / self.count,
            "effective_range": totals["ranges"] / totals["groups"] if totals["groups"] else None,
            "grid_distance": {
                str(bits): math.sqrt(total / self.count) for bits, total in self.grid.items()
            },
            "movement": math.sqrt(totals["moved"] / before) if before else None,
        }


def sums_of(
    weight_RC: Tensor,
    parameters: WeightStatistics,
    bits: Sequence[int],
    before_RC: Tensor | None = None,
) -> WeightSums:
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
    ranges, groups, grid = 0.0, 0, dict.fromkeys(bits, 0.0)
    for rows_RC in _double(weight_RC):
        for part_RGK in split_groups(rows_RC, parameters.group):
            deviation_RG = part_RGK.std(-1, correction=0)
            some_RG = deviation_RG > 0
            range_RG = part_RGK.amax(-1) - part_RGK.amin(-1)
            ranges += float((range_RG[some_RG] / deviation_RG[some_RG]).sum())
            groups += int(some_RG.sum())
            for number in bits:
                fitted = fit(part_RGK, number, symmetric=parameters.sym, dim=-1)
                steps_RGK = (part_RGK - fitted.snap(part_RGK)) / fitted.scale
                grid[number] += float((steps_RGK * steps_RGK).sum())
    totals = {"outliers": far, "ranges": ranges, "groups": groups, "square": square_of(weight_RC)}
    if before_RC is not None:
        totals["moved"] = difference(weight_RC, before_RC)
        totals["square_before"] = square_of(before_RC)
    return WeightSums(count, mean, second, third, fourth, grid, totals)


def joined(a: WeightSums, b: WeightSums) -> WeightSums:
    """Put the sums of two tensors together; what one of them lacks, both lack."""
    count, delta = a.count + b.count, b.mean - a.mean
    share = delta / count
    cross = a.count * b.count * delta
    return WeightSums(
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
        grid={bits: total + b.grid[bits] for bits, total in a.grid.items()},
        totals={name: v + b.totals[name] for name, v in a.totals.items() if name in b.totals},
    )


def square_of(weight_RC: Tensor) -> float:
    """Return the squared norm, added up in float64."""
    return sum(float((part * part).sum()) for part in _double(weight_RC))


def difference(weight_RC: Tensor, other_RC: Tensor) -> float:
    """Return the squared norm of a difference, added up in float64."""
    pairs = zip(_double(weight_RC), _double(other_RC.to(weight_RC.device)), strict=True)
    return sum(float(((a - b) ** 2).sum()) for a, b in pairs)


def _double(weight_RC: Tensor) -> Iterator[Tensor]:
    rows = max(1, _AT_ONCE // max(1, weight_RC.shape[1]))
    for start in range(0, weight_RC.shape[0], rows):
        yield weight_RC[start : start + rows].double()


LinearKey = tuple[int, str]
"""A block, and the name of a linear in it."""


class WeightWatch:
    """Observes the weights as schemes quantize them, and adds up."""

    def __init__(self, case: Case) -> None:
        self._case = case
        # Shipped files are quantized already: their weights are never seen beside the base's.
        self._schemes = tuple(s for s in case.task.schemes if not isinstance(s, Shipped))
        # Two grids are always measured, beside those of the schemes.
        self._bits = sorted({3, 4} | {int(getattr(s, "bits", 3)) for s in self._schemes})
        self._sums: dict[LinearKey, WeightSums] = {}
        self._moved: dict[str, dict[LinearKey, float]] = {}  # by scheme, squared perturbations
        previous = case.previous
        is_read = previous is not None and not is_remote(folder_of(previous))
        self._previous = previous.label if previous is not None and is_read else None
        self._blocks = _blocks_before(case)
        self._block: Block | None = None

    def __call__(self, scheme: Scheme, linears: Linears, quantized: Quantized) -> None:
        moved = self._moved.setdefault(scheme.spec, {})
        parameters = cast(WeightStatistics, self._case.parameters)
        for name, weight_RC in linears.weights.items():
            tensor = linears.block, name
            if tensor not in self._sums:
                before_RC = self._before(*tensor)
                self._sums[tensor] = sums_of(weight_RC, parameters, self._bits, before_RC)
            moved[tensor] = difference(quantized.weights[name], weight_RC)

    def _before(self, block: int, name: str) -> Tensor | None:
        """Return a linear's weight in the checkpoint before; None where it cannot be read."""
        if self._previous is None:
            return None
        try:
            while self._block is None or self._block.index < block:
                self._block = next(self._blocks)
            return self._block.weight(name) if self._block.index == block else None
        except (SourceError, OSError, StopIteration, AttributeError):
            self._previous = None  # gone, or not the same architecture: nothing is compared
            self._close()
            return None

    def _close(self) -> None:
        self._blocks.close()
        self._block = None

    def rows(self) -> list[WeightRow]:
        """Return the rows; schemes that were not observed quantize once more."""
        case = self._case
        if unseen := tuple(s for s in self._schemes if s.spec not in self._moved):
            quantize_only(case.task, unseen, case.machine, case.progress, self)
        self._close()
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
        sums = reduce(joined, (self._sums[tensor] for tensor in tensors))
        norm, perturbation = sums.totals["square"], dict[str, float]()
        for scheme in self._schemes if norm else ():
            square = sum(self._moved[scheme.spec][tensor] for tensor in tensors)
            perturbation[scheme.short] = math.sqrt(square / norm)
        columns = sums.columns()
        if self._previous is None:
            columns["movement"] = None
        return WeightRow(
            subject=self._case.subject.label,
            part=part,
            name=name,
            perturbation=perturbation,
            previous=None if columns["movement"] is None else self._previous,
            **columns,
        )


def _blocks_before(case: Case) -> Generator[Block, None, None]:
    before, machine = case.previous, case.machine
    assert before is not None
    opened = BlockModel(
        folder_of(before), case.weights(before), dtype=machine.dtype, device=machine.device
    )
    yield from opened.blocks()


MEASURE = Measure(
    lambda case: cast(WeightWatch, case.observer or WeightWatch(case)).rows(), watch=WeightWatch
)
