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

**Symmetric grids** that may end below the largest weight: it is cut, and the others are nearer.

    scale = share * max|w| / (2^(b-1) - 1), low = -2^(b-1), high = 2^(b-1) - 1

`fit_searched` tries 80 shares of the range of each row, from 1 down to 0.21, and takes the one that
leaves the least sum of |error|^2.4. That is `--w_clip` of the published code of QUIK and QuaRot;
the papers speak of the squared error. A scale is rounded to the dtype in which a file holds it
before its error is taken. Powers of 2.4 take most of the time, and squares tell most of them:

    sum |error|^2.4 >= K (sum error^2 / K)^1.2

so that only shares whose bound is not above the loss of the one with the least squares are tried.

Shapes: S shares, N rows that have a scale each, P pairs of both, K columns of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Self

from qaudit.core.linears import IntegerCodes
from qaudit.support.lazy import Tensor, torch

SMALLEST_SCALE = 2.0**-17  # of scales in bfloat16
CAST_LAST = "bf16 at last"
"""Of a grid whose scales are rounded to bfloat16 once its codes are chosen."""


@dataclass(frozen=True, eq=False)
class ColumnGrid:
    """Grids of (P, R) scales, one for each row of a group of columns, in all their tensors."""

    scale: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the grid with all its tensors rearranged alike."""
        return replace(
            self, **{part.name: change(getattr(self, part.name)) for part in fields(self)}
        )

    def joined(self, grids: Sequence[Self]) -> Self:
        """Join grids of shape (1, R) into one of shape (P, R)."""
        names = [part.name for part in fields(self)]
        parts = {name: torch.cat([getattr(grid, name) for grid in grids]) for name in names}
        return replace(self, **parts)

    def roundings(self) -> list[Callable[[Tensor], None]]:
        """Return for each of the P grids what rounds the (R,) weights of a column in place."""
        raise NotImplementedError

    def codes_of_points(self, point: Tensor) -> Tensor:
        """Return the codes of numbers on the grid, as uint8."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Grid(ColumnGrid):
    """Scales and the lowest and highest codes, each broadcastable against the weights."""

    low: Tensor
    high: Tensor

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
        return torch.div(point, self.scale).round_().sub_(self.low).to(torch.uint8)


def _round_column(scale_R: Tensor, low_R: Tensor, high_R: Tensor, target_R: Tensor) -> None:
    target_R.div_(scale_R).round_()
    torch.clamp(target_R, low_R, high_R, out=target_R).mul_(scale_R)


def fit(
    weight: Tensor,
    bits: int,
    *,
    symmetric: bool,
    dim: int,
    scale_dtype: str = "float32",
    shares: tuple[float | Tensor, float | Tensor] | None = None,
) -> Grid:
    """Lay grids over the ranges of weights, whose lower and upper ends are cut to shares."""
    # Two passes: `aminmax` along a dimension is up to 18 times slower on a CPU.
    smallest, largest = weight.amin(dim, keepdim=True), weight.amax(dim, keepdim=True)
    if shares:
        smallest, largest = shares[0] * smallest, shares[1] * largest
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
    if symmetric:
        return _symmetric(scale, bits)
    # A scale that was rounded down would put the zero point of a negative group above.
    low = -torch.round(-smallest / scale).clamp_(max=2**bits - 1)
    return Grid(scale, low, low + (2**bits - 1))


def as_held(scale: Tensor, scale_dtype: str) -> Tensor:
    """Return scales rounded to the type in which a file holds them, in their own dtype."""
    if scale_dtype == "bf16":
        scale = scale.to(torch.bfloat16).to(scale.dtype)
    return scale if scale_dtype == "float32" else scale.clamp(min=SMALLEST_SCALE)


def quantize_groups(
    weight_RC: Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    scale_dtype: str = "bf16",
    lay: Callable[[Tensor], Grid] | None = None,
) -> IntegerCodes:
    """Return the codes of groups on their nearest grids, or on those that `lay` returns."""
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


SHARES = tuple(1 - k / 100 for k in range(80))
NORM = 2.4
SLACK = 1e-3  # of a bound, whose sums are rounded
CHUNK = 2**18  # weights that are tried at a time, few enough to stay in a cache
GPU_CHUNK = 2**26  # enough that starting kernels costs less than they do


def fit_share(
    weight: Tensor,
    bits: int,
    share: float | Tensor = 1.0,
    *,
    dim: int = -1,
    scale_dtype: str = "float32",
) -> Grid:
    """Lay symmetric grids over a share of the range of each row, which ends at a code."""
    scale = share * weight.abs().amax(dim, keepdim=True) / (2 ** (bits - 1) - 1)
    return _symmetric(as_held(torch.where(scale == 0, 1.0, scale), scale_dtype), bits)


def fit_searched(weight: Tensor, bits: int, *, dim: int, search: bool = True) -> Grid:
    """Lay symmetric grids over the best share of a range, or over all of it."""
    if not search:
        return fit_share(weight, bits, dim=dim, scale_dtype="bf16")
    rows = weight.movedim(dim, -1)
    flat_NK = rows.reshape(-1, rows.shape[-1])
    scales = [_best_scale(part_NK, bits) for part_NK in flat_NK.split(_chunk_rows(flat_NK))]
    return _symmetric(torch.cat(scales).reshape(*rows.shape[:-1], 1).movedim(-1, dim), bits)


def _symmetric(scale: Tensor, bits: int) -> Grid:
    low = torch.full_like(scale, -(2 ** (bits - 1)))
    return Grid(scale, low, low + (2**bits - 1))


def _best_scale(weight_NK: Tensor, bits: int) -> Tensor:
    top, columns = 2 ** (bits - 1) - 1, weight_NK.shape[1]
    largest_N1 = weight_NK.abs().amax(1, keepdim=True)
    unit_N1 = torch.where(largest_N1 == 0, 1.0, largest_N1)  # powers neither vanish nor overflow
    scale_SN1 = as_held(torch.stack([share * unit_N1 for share in SHARES]).div_(top), "bf16")

    def loss(rows_N: Tensor, scale_N1: Tensor) -> Tensor:
        weight, unit_N = weight_NK[rows_N], unit_N1[rows_N]
        error = torch.div(weight, scale_N1).round_().clamp_(-top - 1, top).mul_(scale_N1)
        return error.sub_(weight).abs_().div_(unit_N).log2_().mul_(NORM).exp2_().sum(1)

    squares = []
    for scale_N1 in scale_SN1:
        steps_NK = torch.div(weight_NK, scale_N1)
        steps_NK.sub_(steps_NK.round().clamp_(-top - 1, top))
        squares.append(torch.linalg.vecdot(steps_NK, steps_NK))
    squares_SN = torch.stack(squares)
    squares_SN *= (scale_SN1 / unit_N1).squeeze(2) ** 2
    bound_SN = (1 - SLACK) * columns * (squares_SN / columns) ** (NORM / 2)
    every_N, nearest_N = torch.arange(len(unit_N1), device=unit_N1.device), squares_SN.argmin(0)
    tried_SN = bound_SN <= loss(every_N, scale_SN1[nearest_N, every_N])
    loss_SN = torch.full_like(bound_SN, float("inf"))
    # All pairs at once: a GPU waits wherever the host must be told how many there are.
    for tried_P2 in tried_SN.nonzero().split(_chunk_rows(weight_NK)):
        shares_P, rows_P = tried_P2.unbind(1)
        loss_SN[shares_P, rows_P] = loss(rows_P, scale_SN1[shares_P, rows_P])
    return scale_SN1[loss_SN.argmin(0), every_N, 0]


def _chunk_rows(weight_NK: Tensor) -> int:
    on_host = weight_NK.device.type == "cpu"
    return max(1, (CHUNK if on_host else GPU_CHUNK) // weight_NK.shape[1])
