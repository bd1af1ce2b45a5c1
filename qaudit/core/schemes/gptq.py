"""GPTQ: round column by column, letting the columns behind make up for each error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2210.17323). The published loop needs the upper Cholesky factor of the inverse
Hessian: three cubic factorizations. Here one suffices: H = U D U^T with U unit upper
triangular, and rounding column j towards weight_j + sum_{i<j} e_i U_ij is the same algorithm
(`qaudit/core/gptq_block.py`). In double precision the codes are identical to the published
loop's.

Flags and conventions are those of GPTQModel; how much text calibrates is the recipe's, 64 documents
by default where 2510.06213 took 1,024:
- the Hessian is the Gram matrix of the inputs the scheme's own, already quantized, earlier
  blocks produce; `damp` times its mean diagonal is added, and `damp_increment` more each time
  the factorization fails. A column that is always zero gets zero weights.
- the scales of a group are taken when the first block of 128 columns that holds some of it
  begins, from weights that already make up for the blocks before; `static_groups` takes them
  from the original weights.
- `act_order` walks the columns by falling diagonal of the Hessian (`desc_act`).
  `act_group_aware` (Gafni et al., 2505.14638) keeps groups whole: it sorts the columns within
  each group, and the full groups by their largest diagonal; a ragged last group stays last.

All linears that read the same input share one Hessian, so their rows are solved as one matrix.

`fused` rounds with the kernel of `qaudit/core/gptq_triton.py`; where that cannot run, the plain
loop does, and a note says why. Results differ where a weight is at a tie, if at all.

Given up: GPTQModel's search over scales by mean squared error, off by default there too.

Shapes: R rows of all linears together, C columns, B columns of a block, P grids of a block.
Weights are transposed, and `order` says which column comes when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar

from qaudit.core.gptq_block import BLOCK, factor_backwards, quantize_block
from qaudit.core.gptq_triton import obstacle, quantize_block_fused
from qaudit.core.grid import Grid, as_stored, fit, group_count, group_notes, group_size
from qaudit.core.scheme import (
    Calibration,
    Linears,
    Quantized,
    Scheme,
    check_bits,
    check_group,
    check_scale_dtype,
    decoded,
    refuse_nonfinite,
    required_inputs,
)
from qaudit.core.stored import IntegerCodes
from qaudit.errors import SchemeError, SourceError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Gptq(Scheme):
    """Round columns in turn, each error made up for by later columns (GPTQ)."""

    name: ClassVar[str] = "gptq"
    version: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "paper-a": {
            "act_order": True,
            "act_group_aware": False,
            "damp": 0.05,
            "scale_dtype": "float32",
        },
        "llm-compressor": {
            "act_order": True,
            "act_group_aware": False,
            "static_groups": True,
            "damp": 0.01,
            "damp_increment": 0.0,
        },
        "autogptq": {
            "act_order": True,
            "act_group_aware": False,
            "static_groups": False,
            "damp": 0.01,
            "damp_increment": 0.0,
        },
        "gptqmodel": {
            "act_order": False,
            "act_group_aware": True,
            "static_groups": False,
            "damp": 0.05,
            "damp_increment": 0.01,
        },
    }
    remarks: ClassVar[Mapping[str, str]] = {
        "paper-a": "2510.06213 says 'the defaults of GPTQModel' and no version; that these are of "
        "the releases of 2025 before version 5, with damp=0.05 and not the 0.01 of earlier ones, "
        "is inferred from its lock file",
        "llm-compressor": "it takes the statistics of all linears of a block before it quantizes "
        "the first, and here each group's are taken behind those that are quantized",
        "autogptq": "archived; its grid for a symmetric group without negative weights differs",
    }

    bits: int
    group: int = 128
    sym: bool = True
    act_order: bool = False
    act_group_aware: bool = True
    static_groups: bool = False
    damp: float = 0.05
    damp_increment: float = 0.01
    scale_dtype: str = "bf16"
    fused: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits)
        check_group(self.group)
        check_scale_dtype(self.scale_dtype)
        if self.act_order and self.act_group_aware:
            raise SchemeError(
                "`act_order` and `act_group_aware` are two orders of the same columns",
                hint="add act_group_aware=false to use act_order",
            )
        if not 0 < self.damp < 1:
            raise SchemeError(f"a damp of {self.damp} is out of range", hint="use 0 < damp < 1")
        if not 0 <= self.damp_increment < 1:
            raise SchemeError(
                f"a damp_increment of {self.damp_increment} is out of range",
                hint="use 0 <= damp_increment < 1; 0 never raises the damping",
            )

    def quantize(self, linears: Linears) -> Quantized:
        import torch

        refuse_nonfinite(linears)
        gram_CC = required_inputs(linears, self.name).gram_CC
        originals = list(linears.weights.values())
        wide = torch.promote_types(originals[0].dtype, torch.float32)
        weight_CR = torch.cat([w.detach().to(wide) for w in originals]).T.contiguous()
        columns = len(weight_CR)
        gram_CC = gram_CC.to(device=weight_CR.device, dtype=wide)

        dead_C = gram_CC.diagonal() == 0
        weight_CR[dead_C.nonzero().flatten()] = 0
        order_C = self._order(gram_CC.diagonal())
        factor_CC, notes = self._factor(gram_CC, dead_C, order_C, list(linears.weights))
        round_block, kernel_notes = self._column_loop(weight_CR)
        joined = self._solve(weight_CR, order_C, factor_CC, round_block)
        del weight_CR, factor_CC
        parts = joined.split_rows([len(w) for w in originals])
        stored = dict(zip(linears.weights, parts, strict=True))
        return decoded(linears, stored, (*group_notes(columns, self.group), *notes, *kernel_notes))

    def _order(self, diagonal_C: Tensor) -> Tensor:
        import torch

        columns = len(diagonal_C)
        if self.act_order:
            return torch.argsort(diagonal_C, descending=True, stable=True)
        order_C = torch.arange(columns, device=diagonal_C.device)
        if not self.act_group_aware:
            return order_C
        size = group_size(columns, self.group)
        full = columns - columns % size
        sorted_GK, within_GK = diagonal_C[:full].view(-1, size).sort(descending=True, stable=True)
        groups_G = torch.argsort(sorted_GK[:, 0], descending=True, stable=True)
        starts_G1 = torch.arange(0, full, size, device=diagonal_C.device)[:, None]
        order_C[:full] = (starts_G1 + within_GK)[groups_G].flatten()
        return order_C

    def _factor(
        self, gram_CC: Tensor, dead_C: Tensor, order_C: Tensor, names: list[str]
    ) -> tuple[Tensor, list[str]]:
        """Return the transpose of U, unit lower triangular, in the order of rounding."""
        import torch

        alive = int((~dead_C).sum())
        notes = [f"{len(dead_C) - alive} columns never see an input"] if alive < len(dead_C) else []
        # The weights of dead columns are zero, so that any positive diagonal does. The mean of
        # the living ones makes the damping the same whatever unit the inputs are in.
        bare_C = gram_CC.diagonal()[order_C]
        mean = bare_C.sum() / alive if alive else torch.ones_like(bare_C[0])
        bare_C = torch.where(bare_C == 0, mean, bare_C)
        damp = self.damp
        while damp < 1:
            hessian_CC = gram_CC.index_select(0, order_C).index_select(1, order_C)
            hessian_CC.diagonal().copy_(bare_C + damp * mean)
            factor_CC = factor_backwards(hessian_CC)
            if factor_CC is not None:
                if damp > self.damp:
                    notes.append(f"damping raised from {self.damp} to {damp:.4g} to factorize")
                return factor_CC, notes
            if not self.damp_increment:
                break
            damp += self.damp_increment
        joined = ", ".join(f"`{name}`" for name in names)
        raise SourceError(
            f"the Hessian of {joined} cannot be factorized from a damping of {self.damp:.4g} on",
            hint="give more calibration text, or a larger damp and a damp_increment",
        )

    def _column_loop(self, weight_CR: Tensor) -> tuple[Callable[..., None], list[str]]:
        """Return the function that rounds a block, and a note if it is not the requested one."""
        if not self.fused:
            return quantize_block, []
        if reason := obstacle(weight_CR):
            return quantize_block, [f"rounded by the plain loop, not the fused kernel: {reason}"]
        return quantize_block_fused, ["rounded by the fused kernel"]

    def _solve(
        self,
        weight_CR: Tensor,
        order_C: Tensor,
        factor_CC: Tensor,
        round_block: Callable[..., None],
    ) -> IntegerCodes:
        import torch

        columns = len(weight_CR)
        size = group_size(columns, self.group)
        if self.static_groups:
            grids = [self._fit(weight_CR[a : a + size]) for a in range(0, columns, size)]
            group_of_C = (order_C // size).tolist()
        else:
            grids = []
            group_of_C = [position // size for position in range(columns)]
        error_CR = weight_CR.index_select(0, order_C)  # weights, until their block is rounded
        quantized_CR = torch.empty_like(error_CR)  # feedback, until their block is rounded
        codes_CR = torch.empty_like(error_CR, dtype=torch.uint8)
        for start in range(0, columns, BLOCK):
            stop = min(start + BLOCK, columns)
            # Groups that begin in this block and the columns they reach, maybe beyond it.
            starts = range(-(-start // size) * size, stop, size)
            reach = min(max(stop, starts[-1] + size), columns) if starts else stop
            weight_BR, feedback_BR = error_CR[start:reach], quantized_CR[start:reach]
            torch.mm(factor_CC[start:reach, :start], error_CR[:start], out=feedback_BR)
            if not self.static_groups and starts:
                moved_BR = weight_BR
                if start:
                    triangle_BB = factor_CC[start:reach, start:reach]
                    moved_BR = _settle(triangle_BB, feedback_BR).add_(weight_BR)
                grids += [self._fit(moved_BR[a - start : a - start + size]) for a in starts]
            used = sorted(set(group_of_C[start:stop]))
            grid_PR = _stack([grids[group] for group in used])
            grid_of_B = [used.index(group) for group in group_of_C[start:stop]]
            rounded_BR = quantized_CR[start:stop].add_(error_CR[start:stop])
            triangle_BB = factor_CC[start:stop, start:stop]
            round_block(error_CR[start:stop], rounded_BR, triangle_BB, grid_PR, grid_of_B)
            grid_BR = grid_PR if len(used) == 1 else grid_PR.each(itemgetter(grid_of_B))
            codes_CR[start:stop] = grid_BR.codes_of_points(rounded_BR)
        grid_GR = _stack(grids)
        # An error that is not a number reaches all later columns of its row. Codes cannot hold
        # it, so that the scales of the row do: the loss then shows it.
        grid_GR.scale[:, ~torch.isfinite(error_CR[-1])] = float("nan")
        return self._in_order(codes_CR, grid_GR, group_of_C, order_C)

    def _in_order(
        self, codes_CR: Tensor, grid_GR: Grid, group_of_C: list[int], order_C: Tensor
    ) -> IntegerCodes:
        """Put columns into their own order, and groups where that does not depend on columns."""
        import torch

        columns, size = len(codes_CR), group_size(len(codes_CR), self.group)
        position_C = torch.argsort(order_C)
        index_C = torch.tensor(group_of_C, dtype=torch.int32, device=order_C.device)[position_C]
        scattered = self.act_order and not self.static_groups and group_count(columns, size) > 1
        if not scattered:
            grid_GR = grid_GR.each(itemgetter(index_C[::size].long()))
        return IntegerCodes(
            codes_CR.index_select(0, position_C).T,
            as_stored(grid_GR.scale.T, self.scale_dtype),
            None if self.sym else grid_GR.low.T.neg().to(torch.uint8),
            self.bits,
            size,
            index_C if scattered else None,
        )

    def _fit(self, weight_KR: Tensor) -> Grid:
        return fit(weight_KR, self.bits, symmetric=self.sym, dim=0, scale_dtype=self.scale_dtype)


def _settle(triangle_BB: Tensor, feedback_BR: Tensor) -> Tensor:
    """Return by how much the columns not yet rounded move to make up best for the errors so far.

    That is where no term of the output error they could still remove is left: the move x of
    those columns has x U = (errors so far) U there, which `feedback_BR` holds. The triangle is
    small and its diagonal is 1, so that its inverse is harmless, and faster than solving.
    """
    import torch

    identity_BB = torch.eye(len(triangle_BB), dtype=triangle_BB.dtype, device=triangle_BB.device)
    inverse_BB: Tensor = torch.linalg.solve_triangular(
        triangle_BB, identity_BB, upper=False, unitriangular=True
    )
    return inverse_BB @ feedback_BR


def _stack(grids: list[Grid]) -> Grid:
    """Join grids of shape (1, R) into one of shape (P, R)."""
    import torch

    return Grid(
        torch.cat([grid.scale for grid in grids]),
        torch.cat([grid.low for grid in grids]),
        torch.cat([grid.high for grid in grids]),
    )
