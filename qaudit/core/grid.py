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

Groups run along the columns of a row. A last group that does not fill up is a group of its
own; a group larger than a row is one group per row; both are notes.

Shapes: R rows, C columns, G groups, K columns of one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SCALE_BITS = 16


@dataclass(frozen=True, eq=False)
class Grid:
    """Scales and the lowest and highest codes, each broadcastable against the weights."""

    scale: Tensor
    low: Tensor
    high: Tensor

    def snap(self, weight: Tensor) -> Tensor:
        import torch

        codes = torch.div(weight, self.scale).round_()
        return torch.clamp(codes, self.low, self.high).mul_(self.scale)


def fit(weight: Tensor, bits: int, *, symmetric: bool, dim: int) -> Grid:
    """Lay a grid over the range of the weights along one dimension."""
    # Two passes: `aminmax` along a dimension is up to 18 times slower on a CPU.
    smallest, largest = weight.amin(dim, keepdim=True), weight.amax(dim, keepdim=True)
    return fit_range(smallest, largest, bits, symmetric=symmetric)


def fit_range(smallest: Tensor, largest: Tensor, bits: int, *, symmetric: bool) -> Grid:
    """Lay a grid over the given ranges, widened to include zero."""
    import torch

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
    half = 2 ** (bits - 1)
    low = torch.full_like(scale, -half) if symmetric else -torch.round(-smallest / scale)
    return Grid(scale, low, low + (2**bits - 1))


def snap_groups(weight_RC: Tensor, bits: int, group: int, *, symmetric: bool) -> Tensor:
    """Round every group of every row to the nearest value on its own grid."""
    import torch

    parts = [
        fit(part_RGK, bits, symmetric=symmetric, dim=-1).snap(part_RGK).flatten(1)
        for part_RGK in split_groups(weight_RC, group)
    ]
    return torch.cat(parts, dim=1)


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


def storage_bits(rows: int, columns: int, bits: int, group: int, *, symmetric: bool) -> int:
    """Count codes, 16-bit scales and, if there are any, zero points as wide as a code."""
    per_group = SCALE_BITS + (0 if symmetric else bits)
    return rows * (columns * bits + group_count(columns, group) * per_group)
