"""Round the columns of a matrix in turn, each error made up for by the columns behind it.

What every scheme of GPTQ's family shares: the order of columns, the factorization of the Hessian
(`qaudit/core/gptq_block.py`), the walk through blocks and the scales of groups on the way. What is
rounded to is any grid (`qaudit/core/grid.py`, 4-bit floats).

A scheme that makes up for more than its own rounding hands over a `Start`:

- weights that the first rounding starts from are others (`Start.weight_CR`), and so may be the
  target of the first column (`Start.first_R`);
- columns feed what they are to later ones, beside their errors (`Start.pull_CC`):

      target_j = weight_j + sum_{i<j} error_i U_ij + sum_{i<j} value_i S_ij

  The value is the target within a block and the rounded weight behind it: that is what GPTAQ's
  loop does, in which a block's columns are overwritten by what they are rounded to.

Shapes: R rows of all linears together, C columns, B columns of a block, P grids of a block.
Weights are transposed. Everything but the result is in the order of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

from qaudit.core.gptq_block import BLOCK, Pull, factor_backwards, quantize_block
from qaudit.core.grid import ColumnGrid, group_count, group_size
from qaudit.errors import SourceError
from qaudit.support.lazy import Tensor, torch

G = TypeVar("G", bound=ColumnGrid)
POWER_STEPS = 30

RoundBlock = Callable[..., None]
Fit = Callable[["Tensor"], G]
"""Lay a grid over the (K, R) weights of a group, one for each row."""


@dataclass(frozen=True, eq=False)
class Hessian:
    """A damped Gram matrix as U D U^T, columns in the order of rounding."""

    order_C: Tensor
    lower_CC: Tensor  # U^T, unit lower triangular; what is above its diagonal has no meaning
    diagonal_C: Tensor  # D
    notes: tuple[str, ...] = ()

    def ordered(self, matrix_CC: Tensor) -> Tensor:
        """Return a matrix with rows and columns in the order of rounding."""
        return matrix_CC.index_select(0, self.order_C).index_select(1, self.order_C)


@dataclass(frozen=True, eq=False)
class Start:
    """From where columns are rounded, where that is not the weights alone."""

    weight_CR: Tensor | None = None
    first_R: Tensor | None = None
    pull_CC: Tensor | None = None  # the transpose of S, strictly lower triangular


def column_order(
    diagonal_C: Tensor, group: int, *, act_order: bool, act_group_aware: bool
) -> Tensor:
    """Return which column comes when, by the diagonal of the Gram matrix."""
    columns = len(diagonal_C)
    if act_order:
        return torch.argsort(diagonal_C, descending=True, stable=True)
    order_C = torch.arange(columns, device=diagonal_C.device)
    if not act_group_aware:
        return order_C
    size = group_size(columns, group)
    full = columns - columns % size
    sorted_GK, within_GK = diagonal_C[:full].view(-1, size).sort(descending=True, stable=True)
    groups_G = torch.argsort(sorted_GK[:, 0], descending=True, stable=True)
    starts_G1 = torch.arange(0, full, size, device=diagonal_C.device)[:, None]
    order_C[:full] = (starts_G1 + within_GK)[groups_G].flatten()
    return order_C


def factorize(
    gram_CC: Tensor,
    order_C: Tensor,
    names: Sequence[str],
    *,
    damp: float,
    damp_increment: float,
    to_largest: bool = False,
) -> Hessian:
    """Damp and factorize a Gram matrix, by parts of its mean diagonal or largest eigenvalue."""
    dead_C = gram_CC.diagonal() == 0
    alive = int((~dead_C).sum())
    notes = [f"{len(dead_C) - alive} columns never see an input"] if alive < len(dead_C) else []
    # The weights of dead columns are zero, so that any positive diagonal does. The mean of
    # the living ones makes the damping the same whatever unit the inputs are in.
    bare_C = gram_CC.diagonal()[order_C]
    mean = bare_C.sum() / alive if alive else torch.ones_like(bare_C[0])
    bare_C = torch.where(bare_C == 0, mean, bare_C)
    unit = _largest_eigenvalue(gram_CC) if to_largest and alive else mean
    raised = damp
    while raised < 1:
        hessian_CC = gram_CC.index_select(0, order_C).index_select(1, order_C)
        hessian_CC.diagonal().copy_(bare_C + raised * unit)
        factors = factor_backwards(hessian_CC)
        if factors is not None:
            if raised > damp:
                notes.append(f"damping raised from {damp} to {raised:.4g} to factorize")
            return Hessian(order_C, *factors, tuple(notes))
        if not damp_increment:
            break
        raised += damp_increment
    joined = ", ".join(f"`{name}`" for name in names)
    raise SourceError(
        f"the Hessian of {joined} cannot be factorized from a damping of {raised:.4g} on",
        hint="give more calibration text, or a larger damp and a damp_increment",
    )


def _largest_eigenvalue(gram_CC: Tensor) -> Tensor:
    vector_C = gram_CC.diagonal() / gram_CC.diagonal().norm()
    value: Tensor = vector_C.norm()
    for _ in range(POWER_STEPS):
        vector_C = gram_CC @ vector_C
        value = vector_C.norm()
        vector_C = vector_C / value
    return value


def solve(
    weight_CR: Tensor,
    hessian: Hessian,
    fit: Fit[G],
    *,
    group: int,
    static_groups: bool,
    scattered: bool = False,
    round_block: RoundBlock = quantize_block,
    start: Start | None = None,
) -> tuple[Tensor, G, Tensor | None]:
    """Return codes in the columns' own order, grids of groups, and the group of each column.

    The last only where a column's group is not its number over the size. `static_groups`: scales
    are those of the given weights; `scattered`: the order of columns mixes groups.
    """
    start = start or Start()
    columns = len(weight_CR)
    size = group_size(columns, group)
    order_C, lower_CC, pull_CC = hessian.order_C, hessian.lower_CC, start.pull_CC
    if static_groups:
        grids = [fit(weight_CR[a : a + size]) for a in range(0, columns, size)]
        group_of_C = (order_C // size).tolist()
    else:
        grids = list[G]()
        group_of_C = [position // size for position in range(columns)]
    # Weights, until their block is rounded; then their errors.
    error_CR = start.weight_CR
    if error_CR is None:
        error_CR = weight_CR.index_select(0, order_C)
    quantized_CR = torch.empty_like(error_CR)  # feedback, until their block is rounded
    codes_CR = torch.empty_like(error_CR, dtype=torch.uint8)
    for first in range(0, columns, BLOCK):
        stop = min(first + BLOCK, columns)
        # Groups that begin in this block and the columns they reach, maybe beyond it.
        starts = range(-(-first // size) * size, stop, size)
        reach = min(max(stop, starts[-1] + size), columns) if starts else stop
        weight_BR, feedback_BR = error_CR[first:reach], quantized_CR[first:reach]
        torch.mm(lower_CC[first:reach, :first], error_CR[:first], out=feedback_BR)
        pull = None
        if pull_CC is not None:
            feedback_BR.addmm_(pull_CC[first:reach, :first], quantized_CR[:first])
            own_BB = pull_CC[first:stop, first:stop]
            pull = Pull(own_BB, torch.empty_like(error_CR[first:stop]))
        if not static_groups and starts:
            moved_BR = weight_BR
            if first:
                triangle_BB = lower_CC[first:reach, first:reach]
                moved_BR = _settle(triangle_BB, feedback_BR).add_(weight_BR)
            grids += [fit(moved_BR[a - first : a - first + size]) for a in starts]
        used = sorted(set(group_of_C[first:stop]))
        grid_PR = grids[0].joined([grids[group] for group in used])
        grid_of_B = [used.index(group) for group in group_of_C[first:stop]]
        rounded_BR = quantized_CR[first:stop].add_(error_CR[first:stop])
        if not first and start.first_R is not None:
            rounded_BR[0] = start.first_R
        triangle_BB = lower_CC[first:stop, first:stop]
        block = error_CR[first:stop], rounded_BR, triangle_BB, grid_PR, grid_of_B
        round_block(*block, *([pull] if pull else []))
        if pull is not None:
            error_CR[first:stop] += _left_in_block(triangle_BB, pull, rounded_BR)
        grid_BR = grid_PR if len(used) == 1 else grid_PR.each(itemgetter(grid_of_B))
        codes_CR[first:stop] = grid_BR.codes_of_points(rounded_BR)
    grid_GR = grids[0].joined(grids)
    # An error that is not a number reaches all later columns of its row. Codes cannot hold
    # it, so that the scales of the row do: the loss then shows it.
    grid_GR.scale[:, ~torch.isfinite(error_CR[-1])] = float("nan")
    position_C = torch.argsort(order_C)
    codes_CR = codes_CR.index_select(0, position_C)
    index_C = torch.tensor(group_of_C, dtype=torch.int32, device=order_C.device)[position_C]
    if scattered and not static_groups and group_count(columns, size) > 1:
        return codes_CR, grid_GR, index_C
    return codes_CR, grid_GR.each(itemgetter(index_C[::size].long())), None


def _left_in_block(triangle_BB: Tensor, pull: Pull, rounded_BR: Tensor) -> Tensor:
    """Return how much more a block's targets fed within it than its rounded weights would have.

    Later blocks count rounded weights: the rest counts as an error.
    """
    fed_BR = pull.lower_BB @ (pull.target_BR - rounded_BR)
    left_BR: Tensor = torch.linalg.solve_triangular(
        triangle_BB, fed_BR, upper=False, unitriangular=True
    )
    return left_BR


def _settle(triangle_BB: Tensor, feedback_BR: Tensor) -> Tensor:
    """Return by how much the columns not yet rounded move to make up best for the errors so far.

    That is where no term of the output error they could still remove is left: the move x of
    those columns has x U = (errors so far) U there, which `feedback_BR` holds. The triangle is
    small and its diagonal is 1, so that its inverse is harmless, and faster than solving.
    """
    identity_BB = torch.eye(len(triangle_BB), dtype=triangle_BB.dtype, device=triangle_BB.device)
    inverse_BB: Tensor = torch.linalg.solve_triangular(
        triangle_BB, identity_BB, upper=False, unitriangular=True
    )
    return inverse_BB @ feedback_BR
