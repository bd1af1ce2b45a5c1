"""GPTQ: round column by column, letting the columns behind make up for each error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2210.17323). The published loop needs the upper Cholesky factor of the inverse
Hessian: three cubic factorizations. Here one suffices. The Cholesky factor of the Hessian with
rows and columns reversed, reversed again, is upper triangular with H = V V^T; scaling its
columns to a unit diagonal gives U, and rounding column j towards weight_j + sum_{i<j} e_i U_ij
is the same algorithm (`qaudit/core/gptq_block.py`). In double precision the codes are
identical to the published loop's.

Conventions are those of GPTQModel, where today's users get their GPTQ from:
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

Given up: GPTQModel's search over scales by mean squared error, off by default there too.

Shapes: R rows of all linears together, C columns, B columns of a block, P grids of a block.
Weights are transposed, and `order` says which column comes when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qaudit.core.finite import refuse_nonfinite, required_inputs
from qaudit.core.gptq_block import BLOCK, quantize_block
from qaudit.core.grid import Grid, fit, group_count, group_notes, group_size, storage_bits
from qaudit.core.scheme import Calibration, Linears, Quantized, Scheme, check_bits, check_group
from qaudit.errors import SchemeError, SourceError

if TYPE_CHECKING:
    from torch import Tensor

INDEX_BITS = 32  # a column's group under act_order, as GPTQ files store it


@dataclass(frozen=True, kw_only=True)
class Gptq(Scheme):
    """Round columns in turn, each error made up for by later columns (GPTQ)."""

    name: ClassVar[str] = "gptq"
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "paper-a": {"act_order": True, "act_group_aware": False, "damp": 0.05}
    }

    bits: int
    group: int = 128
    sym: bool = True
    act_order: bool = False
    act_group_aware: bool = True
    static_groups: bool = False
    damp: float = 0.05
    damp_increment: float = 0.01

    def __post_init__(self) -> None:
        """Refuse parameters without a meaning."""
        check_bits(self.bits)
        check_group(self.group)
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
        """Quantize all linears as one matrix over their common Hessian."""
        import torch

        refuse_nonfinite(linears)
        gram_CC = required_inputs(linears, self.name).gram_CC
        originals = list(linears.weights.values())
        wide = torch.promote_types(originals[0].dtype, torch.float32)
        weight_CR = torch.cat([w.to(wide) for w in originals]).T.contiguous()
        columns, rows = weight_CR.shape
        gram_CC = gram_CC.to(device=weight_CR.device, dtype=wide)

        dead_C = gram_CC.diagonal() == 0
        weight_CR[dead_C] = 0
        order_C = self._order(gram_CC.diagonal())
        factor_CC, notes = self._factor(gram_CC, dead_C, order_C, list(linears.weights))
        quantized_CR = torch.empty_like(weight_CR)
        quantized_CR[order_C] = self._solve(weight_CR, order_C, factor_CC)

        parts = quantized_CR.T.split([len(w) for w in originals])
        weights = {
            name: part_RC.to(original.dtype).contiguous()
            for (name, original), part_RC in zip(linears.weights.items(), parts, strict=True)
        }
        bits = storage_bits(rows, columns, self.bits, self.group, symmetric=self.sym)
        if self.act_order and not self.static_groups and group_count(columns, self.group) > 1:
            bits += INDEX_BITS * columns * len(originals)
        return Quantized(weights, bits, (*group_notes(columns, self.group), *notes))

    def _order(self, diagonal_C: Tensor) -> Tensor:
        """Return the columns in the order in which they are rounded."""
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

        reverse_C = order_C.flip(0)
        hessian_CC = gram_CC[reverse_C][:, reverse_C]
        diagonal_C = hessian_CC.diagonal()
        # The weights of dead columns are zero, so that any positive diagonal does. The mean of
        # the living ones makes the damping the same whatever unit the inputs are in.
        alive = int((~dead_C).sum())
        mean = diagonal_C.sum() / max(alive, 1) if alive else torch.ones_like(diagonal_C[0])
        bare_C = torch.where(dead_C[reverse_C], mean, diagonal_C)
        notes = [f"{len(dead_C) - alive} columns never see an input"] if alive < len(dead_C) else []
        damp = self.damp
        while damp < 1:
            diagonal_C.copy_(bare_C + damp * mean)
            lower_CC, failed = torch.linalg.cholesky_ex(hessian_CC)
            if not failed:
                if damp > self.damp:
                    notes.append(f"damping raised from {self.damp} to {damp:.4g} to factorize")
                # lower reversed is V; dividing its columns by the diagonal and transposing it
                # is dividing the rows of the reversed transpose.
                factor_CC = lower_CC.flip(0, 1).T.contiguous()
                return factor_CC.div_(factor_CC.diagonal().clone()[:, None]), notes
            if not self.damp_increment:
                break
            damp += self.damp_increment
        joined = ", ".join(f"`{name}`" for name in names)
        raise SourceError(
            f"the Hessian of {joined} cannot be factorized with a damping of {damp:.4g}",
            hint="give more calibration text, or a larger damp",
        )

    def _solve(self, weight_CR: Tensor, order_C: Tensor, factor_CC: Tensor) -> Tensor:
        """Return the quantized weights, columns in the order of rounding."""
        import torch

        columns = len(weight_CR)
        size = group_size(columns, self.group)
        if self.static_groups:
            grids = [self._fit(weight_CR[a : a + size]) for a in range(0, columns, size)]
            group_of_C = (order_C // size).tolist()
        else:
            grids = []
            group_of_C = [position // size for position in range(columns)]
        weight_CR = weight_CR[order_C]
        quantized_CR, error_CR = torch.empty_like(weight_CR), torch.empty_like(weight_CR)
        for start in range(0, columns, BLOCK):
            stop = min(start + BLOCK, columns)
            target_BR = weight_CR[start:stop].clone()
            if start:
                target_BR.addmm_(factor_CC[start:stop, :start], error_CR[:start])
            if not self.static_groups:
                grids += self._dynamic_grids(weight_CR, error_CR, factor_CC, start, stop)
            used = sorted(set(group_of_C[start:stop]))
            quantized_CR[start:stop], error_CR[start:stop] = quantize_block(
                weight_CR[start:stop],
                target_BR,
                factor_CC[start:stop, start:stop].T.contiguous(),
                _stack([grids[group] for group in used]),
                [used.index(group) for group in group_of_C[start:stop]],
            )
        return quantized_CR

    def _dynamic_grids(
        self, weight_CR: Tensor, error_CR: Tensor, factor_CC: Tensor, start: int, stop: int
    ) -> list[Grid]:
        """Fit the groups that begin in a block to weights that make up for the blocks before.

        The columns not yet rounded make up best for the errors so far when they solve the
        triangle that is left: the feedback x of columns start.. has x U = e U_before there.
        """
        import torch

        size = group_size(len(weight_CR), self.group)
        starts = range(-(-start // size) * size, stop, size)
        if not starts:
            return []
        reach = min(max(stop, starts[-1] + size), len(weight_CR))
        moved_BR = weight_CR[start:reach]
        if start:
            moved_BR = moved_BR + torch.linalg.solve_triangular(
                factor_CC[start:reach, start:reach],
                factor_CC[start:reach, :start] @ error_CR[:start],
                upper=False,
                unitriangular=True,
            )
        return [self._fit(moved_BR[a - start : a - start + size]) for a in starts]

    def _fit(self, weight_KR: Tensor) -> Grid:
        """Lay one grid per row over a group's columns."""
        return fit(weight_KR, self.bits, symmetric=self.sym, dim=0)


def _stack(grids: list[Grid]) -> Grid:
    """Join grids of shape (1, R) into one of shape (P, R)."""
    import torch

    return Grid(
        torch.cat([grid.scale for grid in grids]),
        torch.cat([grid.low for grid in grids]),
        torch.cat([grid.high for grid in grids]),
    )
