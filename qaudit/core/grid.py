"""The uniform integer grid that rtn, gptq and awq share: scales, zero points, groups, bits.

A weight w of a group becomes the code c = clamp(round(w / scale), low, high) and comes back as
c * scale. Codes here are counted from the zero point (low = -zero), which is the same number
as the unsigned codes files store, without adding and subtracting the zero point per weight.

    symmetric     scale = 2 max|w| / (2^b - 1), low = -2^(b-1), high = 2^(b-1) - 1
    asymmetric    scale = (max - min) / (2^b - 1), zero = round(-min / scale), the range always
                  including 0, so that a zero weight stays zero

This is what GPTQModel and llm-compressor compute, with one exception of GPTQModel that is left
out: for a symmetric group without any negative weight it halves the scale and then clips the
upper half of the range. A group of zeros gets the range [-1, 1], as in GPTQModel.

With `scale_dtype=bf16` a scale is rounded to bfloat16, and raised to 2^-17 if it is below, before
any code is chosen: all codes are then best for the scale that a file holds. From 2^-17 up float16
holds the same values exactly, so that files with either type of scales mean the same weights.
Clipping puts the ends of a group half way between two codes, where a rounded scale would decide
about many codes at once: AWQ chooses codes for the scale as it was computed (`CAST_LAST`).
With `scale_dtype=float32` a scale stays as computed (in double precision for float64 weights), and
counts with all its bits.

Groups run along the columns of a row. A last group that does not fill up is a group of its
own; a group larger than a row is one group per row; both are notes.

Shapes: R rows, C columns, G groups, K columns of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from qaudit.core.stored import IntegerCodes
from qaudit.support.lazy import Tensor, torch

SMALLEST_SCALE = 2.0**-17  # of scales in bfloat16
CAST_LAST = "bf16 at last"
"""Of a grid whose scales are rounded to bfloat16 once its codes are chosen."""


class ColumnGrid(Protocol):
    """Grids of (P, R) scales, one for each row of a group of columns."""

    @property
    def scale(self) -> Tensor: ...

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the grid with all its tensors rearranged alike."""

    def joined(self, grids: Sequence[Self]) -> Self:
        """Join grids of shape (1, R) into one of shape (P, R)."""

    def roundings(self) -> list[Callable[[Tensor], None]]:
        """Return for each of the P grids what rounds the (R,) weights of a column in place."""

    def codes_of_points(self, point: Tensor) -> Tensor:
        """Return the codes of numbers on the grid, as uint8."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Scales and the lowest and highest codes, each broadcastable against the weights."""

    scale: Tensor
    low: Tensor
    high: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Grid:
        return Grid(change(self.scale), change(self.low), change(self.high))

    def joined(self, grids: Sequence[Grid]) -> Grid:
        parts = [(grid.scale, grid.low, grid.high) for grid in grids]
        return Grid(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def roundings(self) -> list[Callable[[Tensor], None]]:
        rows = (self.scale.unbind(), self.low.unbind(), self.high.unbind())
        return [partial(_round_column, *row) for row in zip(*rows, strict=True)]

    def snap(self, weight: Tensor) -> Tensor:
        codes = torch.div(weight, self.scale).round_()
        return torch.clamp(codes, self.low, self.high).mul_(self.scale)

    def codes(self, weight: Tensor) -> Tensor:
        """Return the codes of the nearest points, counted from 0, as uint8."""
        codes = torch.div(weight, self.scale).round_()
        return torch.clamp(codes, self.low, self.high).sub_(self.low).to(torch.uint8)

    def codes_of_points(self, point: Tensor) -> Tensor:
        """Return the codes of what `snap` returned, as uint8."""
        return torch.div(point, self.scale).round_().sub_(self.low).to(torch.uint8)


def _round_column(scale_R: Tensor, low_R: Tensor, high_R: Tensor, target_R: Tensor) -> None:
    target_R.div_(scale_R).round_()
    torch.clamp(target_R, low_R, high_R, out=target_R).mul_(scale_R)


def fit(
    weight: Tensor, bits: int, *, symmetric: bool, dim: int, scale_dtype: str = "float32"
) -> Grid:
    # Two passes: `aminmax` along a dimension is up to 18 times slower on a CPU.
    smallest, largest = weight.amin(dim, keepdim=True), weight.amax(dim, keepdim=True)
    return fit_range(smallest, largest, bits, symmetric=symmetric, scale_dtype=scale_dtype)


def fit_range(
    smallest: Tensor, largest: Tensor, bits: int, *, symmetric: bool, scale_dtype: str
) -> Grid:
    """Lay a grid over the given ranges, widened to include zero."""
    smallest, largest = smallest.clamp(max=0), largest.clamp(min=0)
    if symmetric:
        largest = torch.maximum(-smallest, largest)
        smallest = -largest
    empty = smallest == largest
    smallest = torch.where(empty, -1.0, smallest)
    largest = torch.where(empty, 1.0, largest)
    scale = (largest - smallest) / (2**bits - 1)
    # In the smallest subnormals the division can come out as zero; one step then spans them all.
    scale = torch.where(scale == 0, largest - smallest, scale)
    scale = as_held(scale, scale_dtype)
    top = 2**bits - 1
    if symmetric:
        low = torch.full_like(scale, -(2 ** (bits - 1)))
    else:  # a scale that was rounded down would put the zero point of a negative group above
        low = -torch.round(-smallest / scale).clamp_(max=top)
    return Grid(scale, low, low + top)


def as_held(scale: Tensor, scale_dtype: str) -> Tensor:
    """Return scales rounded to the type in which a file holds them, in their own dtype."""
    if scale_dtype == "bf16":
        scale = scale.to(torch.bfloat16).to(scale.dtype)
    return scale if scale_dtype == "float32" else scale.clamp(min=SMALLEST_SCALE)


def snap_groups(
    weight_RC: Tensor, bits: int, group: int, *, symmetric: bool, scale_dtype: str
) -> Tensor:
    parts = [
        fit(part_RGK, bits, symmetric=symmetric, dim=-1, scale_dtype=scale_dtype)
        .snap(part_RGK)
        .flatten(1)
        for part_RGK in split_groups(weight_RC, group)
    ]
    return torch.cat(parts, dim=1)


def quantize_groups(
    weight_RC: Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool,
    scale_dtype: str,
    lay: Callable[[Tensor], Grid] | None = None,
) -> IntegerCodes:
    """Return the codes of what `snap_groups` rounds to, or on the grids that `lay` returns."""
    lay = lay or partial(fit, bits=bits, symmetric=symmetric, dim=-1, scale_dtype=scale_dtype)
    parts = []
    for part_RGK in split_groups(weight_RC, group):
        grid = lay(part_RGK)
        parts.append((grid, grid.codes(part_RGK)))
    return join_groups(parts, bits, group, symmetric=symmetric, scale_dtype=scale_dtype)


def join_groups(
    parts: Sequence[tuple[Grid, Tensor]],
    bits: int,
    group: int,
    *,
    symmetric: bool,
    scale_dtype: str,
) -> IntegerCodes:
    """Join the codes (R, G, K) of full groups and of a ragged one, with grids of (R, G, 1)."""
    codes_RC = torch.cat([codes_RGK.flatten(1) for _, codes_RGK in parts], dim=1)
    scales_RG = torch.cat([grid.scale.flatten(1) for grid, _ in parts], dim=1)
    zeros_RG = None
    if not symmetric:
        zeros_RG = torch.cat([-grid.low.flatten(1) for grid, _ in parts], dim=1).to(torch.uint8)
    size = group_size(codes_RC.shape[1], group)
    return IntegerCodes(codes_RC, as_stored(scales_RG, scale_dtype), zeros_RG, bits, size)


def as_stored(scales: Tensor, scale_dtype: str) -> Tensor:
    return scales if scale_dtype == "float32" else scales.to(torch.bfloat16)


def powers_of_two(scale: Tensor) -> Tensor:
    """Return the powers of two whose logarithms are nearest, exact on every device."""
    mantissa, _ = torch.frexp(scale)  # from 1/2 up to 1
    above = scale / mantissa
    return torch.where(mantissa < 0.5**0.5, above / 2, above)


def split_groups(weight_RC: Tensor, group: int) -> Iterator[Tensor]:
    """Yield the full groups as (R, G, K) and then the ragged last one as (R, 1, K)."""
    rows, columns = weight_RC.shape
    size = group_size(columns, group)
    full = columns - columns % size
    yield weight_RC[:, :full].reshape(rows, -1, size)
    if full < columns:
        yield weight_RC[:, full:].reshape(rows, 1, -1)


def group_size(columns: int, group: int) -> int:
    """Return the size of a full group in a row of so many columns."""
    return columns if group == -1 else min(group, columns)


def group_count(columns: int, group: int) -> int:
    """Return the number of groups in a row, a ragged last one included."""
    return -(-columns // group_size(columns, group))


def group_notes(columns: int, group: int) -> tuple[str, ...]:
    """Return a note where the requested groups do not fit the row."""
    if group > columns:
        return (f"groups of {group} over {columns} columns become one group per row",)
    rest = columns % group_size(columns, group)
    if rest:
        return (f"groups of {group} over {columns} columns leave a last group of {rest}",)
    return ()
