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
- linears are calibrated in turn, behind those of their block that are quantized already;
  `true_sequential=false` takes the statistics of a whole block before it quantizes the first, as
  llm-compressor does.
- `act_order` walks the columns by falling diagonal of the Hessian (`desc_act`).
  `act_group_aware` (Gafni et al., 2505.14638) keeps groups whole: it sorts the columns within
  each group, and the full groups by their largest diagonal; a ragged last group stays last.

All linears that read the same input share one Hessian, so their rows are solved as one matrix.

`fused=auto` rounds with the loop that the plan chose (`qaudit/core/column_loops.py`), on a CPU the
plain one; `true` with the kernel of `qaudit/core/gptq_triton.py`, and a note says where it cannot
run; `false` with the plain loop. Results differ where a weight is at a tie, if at all.

Given up: GPTQModel's search over scales by mean squared error, off by default there too.

Shapes: R rows of all linears together, C columns, K columns of a group. Weights are transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qaudit.core.column_loops import FUSED, LOOPS, PLAIN
from qaudit.core.gptq_solver import Hessian, Start, column_order, factorize, solve
from qaudit.core.gptq_triton import obstacle
from qaudit.core.grid import Grid, as_stored, fit, group_notes, group_size
from qaudit.core.linears import (
    Inputs,
    IntegerCodes,
    Linears,
    Quantized,
    decoded,
    refuse_nonfinite,
    required_inputs,
)
from qaudit.core.scheme import Calibration, Scheme, added, one_of
from qaudit.errors import SchemeError
from qaudit.support.lazy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class Gptq(Scheme):
    """Round columns in turn, each error made up for by later columns (GPTQ)."""

    name: ClassVar[str] = "gptq"
    version: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM
    rounds_columns: ClassVar[bool] = True
    damps_to_largest: ClassVar[bool] = False  # eigenvalue; else to the mean of the diagonal
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
            "true_sequential": False,
            "all_tokens": True,
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
    fused: str = added(
        "auto", one_of("fused", ("auto", "true", "false"), "`{}` is not a way to round columns")
    )
    true_sequential: bool = added(True)
    all_tokens: bool = added(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.act_order and self.act_group_aware:
            raise SchemeError(
                "`act_order` and `act_group_aware` are two orders of the same columns",
                hint="add act_group_aware=false to use act_order",
            )
        if not self.true_sequential:
            if self.calibration is not Calibration.OWN_STREAM:
                raise SchemeError(
                    f"`{self.name}` takes what each group reads behind those quantized before",
                    hint="leave out true_sequential=false",
                )
            object.__setattr__(self, "calibration", Calibration.OWN_BLOCKS)

    def quantize(self, linears: Linears) -> Quantized:
        lay = partial(fit, bits=self.bits, symmetric=self.sym, dim=0, scale_dtype=self.scale_dtype)
        return self.rounded(linears, lay)

    def rounded(self, linears: Linears, lay: Callable[[Tensor], Grid]) -> Quantized:
        """Round onto the grids that `lay` lays over the (K, R) weights of a group."""
        refuse_nonfinite(linears)
        inputs = required_inputs(linears, self.name)
        weight_CR = torch.cat([weight_RC for _, weight_RC in linears.widened()]).T.contiguous()
        gram_CC = inputs.gram_CC.to(weight_CR)
        order_C = column_order(
            gram_CC.diagonal(),
            self.group,
            act_order=self.act_order,
            act_group_aware=self.act_group_aware,
        )
        hessian = factorize(
            gram_CC,
            order_C,
            list(linears.weights),
            damp=self.damp,
            damp_increment=self.damp_increment,
            to_largest=self.damps_to_largest,
        )
        start = self._start(weight_CR, gram_CC, inputs, hessian)
        weight_CR[(gram_CC.diagonal() == 0).nonzero().flatten()] = 0
        round_block, kernel_notes = self._column_loop(weight_CR, linears.column_loop)
        codes_CR, grid_GR, group_of_C = solve(
            weight_CR,
            hessian,
            lay,
            group=self.group,
            static_groups=self.static_groups,
            scattered=self.act_order,
            round_block=round_block,
            start=start,
        )
        counts = [len(weight) for weight in linears.weights.values()]
        scales = as_stored(grid_GR.scale.T, self.scale_dtype).split(counts)
        zeros = None if self.sym else grid_GR.low.T.neg().to(torch.uint8).split(counts)
        stored = {
            name: IntegerCodes(
                codes_RC.contiguous(),
                scales[k].contiguous(),
                None if zeros is None else zeros[k].contiguous(),
                self.bits,
                group_size(linears.columns, self.group),
                group_of_C,
            )
            for k, (name, codes_RC) in enumerate(
                zip(linears.weights, codes_CR.T.split(counts), strict=True)
            )
        }
        notes = (*group_notes(linears.columns, self.group), *hessian.notes, *kernel_notes)
        return decoded(linears, stored, notes)

    def _start(
        self, weight_CR: Tensor, gram_CC: Tensor, inputs: Inputs, hessian: Hessian
    ) -> Start | None:
        return None

    def _column_loop(
        self, weight_CR: Tensor, planned: str
    ) -> tuple[Callable[..., None], list[str]]:
        """Return the function that rounds a block, and a note if it was asked for by name."""
        if self.fused != "true":
            return LOOPS[planned if self.fused == "auto" else PLAIN], []
        if reason := obstacle(weight_CR):
            return LOOPS[PLAIN], [f"rounded by the plain loop, not the fused kernel: {reason}"]
        return LOOPS[FUSED], ["rounded by the fused kernel"]
