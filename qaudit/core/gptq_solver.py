"""Round the columns of a matrix in turn, each error made up for by the columns behind it.

What every scheme of GPTQ's family shares: the order of columns, one factorization of the Hessian,
and the column loop over a block.

With H = U D U^T (U unit upper triangular, D diagonal), the output error of a row is

    sum_j D_jj (e_j + sum_{i<j} e_i U_ij)^2        e = weight - quantized,

so column j is rounded towards `target_j = weight_j + sum_{i<j} e_i U_ij`: that is GPTQ, with
the feedback pulled when a column's turn comes instead of pushed to all columns behind it.

Weights are transposed (columns first): what is touched at each step is then one contiguous
run over the rows, on a CPU as on a GPU. Within a leaf of 16 columns a column pulls what the
leaf's earlier columns feed it; columns behind the leaf get its feedback by one matrix product.

A kernel can replace the column loop (`qaudit/core/column_loops.py`). What it must
keep: IEEE division by the scale, round half to even, codes clamped before they are scaled. The
order in which feedback is summed is free. Rows do not depend on each other, so a program may own
a set of rows and walk the columns alone.

**The solver** walks through blocks, and takes the scales of groups on the way. What is rounded to
is any grid (`qaudit/core/grid.py`, 4-bit floats).

A scheme that makes up for more than its own rounding hands over a `Start`:

- weights that the first rounding starts from are others (`Start.weight_CR`), and so may be the
  target of the first column (`Start.first_R`);
- columns feed what they are to later ones, beside their errors (`Start.pull_CC`):

      target_j = weight_j + sum_{i<j} error_i U_ij + sum_{i<j} value_i S_ij

  The value is the target within a block and the rounded weight behind it: that is what GPTAQ's
  loop does, in which a block's columns are overwritten by what they are rounded to.

Shapes: R rows of all linears together, C columns, B columns of a block, P grids (sets of one scale
per row) used in a block.
Weights are transposed. Everything but the result is in the order of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

from qaudit.core.grid import ColumnGrid, group_count, group_size
from qaudit.errors import SourceError
from qaudit.support.lazy import Tensor, torch

BLOCK = 128
LEAF = 16


@dataclass(frozen=True, eq=False)
class Pull:
    """What columns of a block feed to later ones in it by their targets, beside their errors."""

    lower_BB: Tensor  # strictly lower triangular, row j as in `lower_BB` of the errors
    target_BR: Tensor  # filled with the targets, before they are rounded


def quantize_block(
    weight_BR: Tensor,
    target_BR: Tensor,
    lower_BB: Tensor,
    grid_PR: ColumnGrid,
    grid_of_B: Sequence[int],
    pull: Pull | None = None,
) -> None:
    """Turn `target_BR` into the quantized weights and `weight_BR` into their errors, in place.

    `target_BR` comes with the weights plus the feedback of all earlier blocks, `lower_BB` is
    the transpose of the block's own triangle of U (unit lower; row j holds what earlier
    columns feed to column j), and `grid_of_B` says for each column which row of `grid_PR`
    it is rounded on.
    """
    size = len(weight_BR)
    weights, targets, lowers = weight_BR.unbind(), target_BR.unbind(), lower_BB.unbind()
    roundings = grid_PR.roundings()
    error_RB = weight_BR.T
    for start in range(0, size, LEAF):
        stop = min(start + LEAF, size)
        for j in range(start, stop):
            target_R = targets[j]
            if j > start:
                target_R.addmv_(error_RB.narrow(1, start, j - start), lowers[j][start:j])
            if pull is not None:
                before_RB = pull.target_BR[start:j].T
                target_R.addmv_(before_RB, pull.lower_BB[j, start:j])
                pull.target_BR[j] = target_R
            roundings[grid_of_B[j]](target_R)
            weights[j].sub_(target_R)
        if stop < size:
            target_BR[stop:].addmm_(lower_BB[stop:, start:stop], weight_BR[start:stop])
            if pull is not None:
                pulled_BB = pull.lower_BB[stop:, start:stop]
                target_BR[stop:].addmm_(pulled_BB, pull.target_BR[start:stop])


def factor_backwards(matrix_CC: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the transpose of U and D, or None if the matrix is not positive definite.

    This is the Cholesky factorization of the matrix with rows and columns reversed, written
    without reversing. Blocks keep the work in matrix products: on one CPU core this takes two
    thirds of the time of `torch.linalg.cholesky`, which spends as long on clearing the other
    triangle of a large matrix as on factorizing it.

    With H = G^T G, G lower, going from the last block row k to the first:

        G_kk^T G_kk = S_kk        G_k,<k = G_kk^-T S_k,<k        S_<k,<k -= G_k,<k^T G_k,<k

    Only the lower triangle of `matrix_CC` is read, and overwritten with the result; what
    is above the diagonal afterwards has no meaning.
    """
    starts = range(0, len(matrix_CC), BLOCK)
    root_C = torch.empty_like(matrix_CC[0])
    on_host = matrix_CC.device.type == "cpu"
    failures: list[Tensor] = []
    for start in reversed(starts):
        block = slice(start, start + BLOCK)
        reversed_BB, failed = torch.linalg.cholesky_ex(matrix_CC[block, block].flip(0, 1))
        failures.append(failed)
        if on_host and failed:  # a GPU would wait to tell, so that it is asked once
            return None
        upper_BB = reversed_BB.flip(0, 1)
        panel_BA = matrix_CC[block, :start]
        if start:
            # The inverse of a small, damped block is harmless, and products are what is fast.
            identity_BB = torch.eye(len(upper_BB), dtype=upper_BB.dtype, device=upper_BB.device)
            inverse_BB = torch.linalg.solve_triangular(upper_BB, identity_BB, upper=True)
            panel_BA.copy_(inverse_BB @ panel_BA)
        for before in starts[: start // BLOCK]:
            rows, columns = slice(before, before + BLOCK), slice(0, before + BLOCK)
            matrix_CC[rows, columns].addmm_(panel_BA[:, rows].T, panel_BA[:, columns], alpha=-1)
        root_C[block] = upper_BB.diagonal()
        diagonal_B1 = upper_BB.diagonal()[:, None]
        panel_BA.div_(diagonal_B1)
        matrix_CC[block, block] = upper_BB.T / diagonal_B1
    if bool(torch.stack(failures).any()):
        return None
    return matrix_CC, root_C.square()


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
    names: str,
    damp: float,
    damp_increment: float,
    *,
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
    unit = mean
    if to_largest and alive:
        vector_C = gram_CC.diagonal() / gram_CC.diagonal().norm()
        for _ in range(POWER_STEPS):
            vector_C = gram_CC @ vector_C
            unit = vector_C.norm()
            vector_C = vector_C / unit
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
    raise SourceError(
        f"the Hessian of {names} cannot be factorized from a damping of {raised:.4g} on",
        hint="give more calibration text, or a larger damp and a damp_increment",
    )


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
