"""GPTQ: round column by column, letting the columns behind make up for each error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2210.17323). The published loop needs the upper Cholesky factor of the inverse
Hessian: three cubic factorizations. Here one suffices: H = U D U^T with U unit upper
triangular, and rounding column j towards weight_j + sum_{i<j} e_i U_ij is the same algorithm
(`qaudit/core/gptq_solver.py`). In double precision the codes are identical to the published
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
plain one; `true` with the kernel of `qaudit/core/column_loops.py`, and a note says where it cannot
run; `false` with the plain loop. Results differ where a weight is at a tie, if at all.

Given up: GPTQModel's search over scales by mean squared error, off by default there too.

**GPTAQ** is GPTQ that also makes up for what quantization did to its inputs.

Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration" (2504.02692;
GPTQv2 before). GPTQ keeps each linear's output on the inputs x that quantized earlier blocks
produce; GPTAQ aims at the output of the unquantized model, whose linear reads x':

    min over Q of  sum over tokens of ||Q x - W x'||^2

Beside the rounding errors of GPTQ, a column feeds w_j (x'_j - x_j) to the columns behind it, as
far as these can make up for it. With the inverse Hessian as R^T R, R upper triangular, and the
drift D = sum of (x' - x) x^T, what column j adds to the columns behind it is its value times row j
of

    P = alpha * triu(D R^T, 1) R

as published, `alpha=0.25` included, which is a setting of its authors' code. Here feedback is
pulled (`qaudit/core/gptq_solver.py`). With H = U E U^T that makes it

    S = P U = alpha * triu(D U^-T, 1) E^-1

the same numbers by one triangular solve.

Everything else, grids, orders and damping, is as in `gptq`. Calibration sends the text through the
full-precision and the scheme's own model side by side. With no drift the result is that of `gptq`.

**Qronos** is GPTQ towards the output of the unquantized model, from the first column on.

Zhang et al., "Qronos: Correcting the Past by Shaping the Future... in Post-Training Quantization"
(2505.11695). The objective is that of `gptaq`, over inputs x that quantized earlier blocks
produce and x' that the unquantized model reads:

    min over Q of  sum over tokens of ||Q x - W x'||^2

Column by column, the column itself is first set to undo the error so far and rounded, then all
later columns move to where they minimize what is left. After the first column nothing is left to
undo, so that this is, in closed form,

    q_1       the first column, rounded from  w_1 + (W D)_1 / H_11
    later     GPTQ on  W + W D H^-1              H = sum of x x^T, D = sum of (x' - x) x^T

H is damped by `damp` times its largest eigenvalue, 1e-6 as published for weights alone, by 30 steps
of power iteration; the damping draws Q towards W, as in Brevitas. Where float32 cannot factorize
that, `damp_increment` raises it, and a note says so.

Everything else, grids and orders, is as in `gptq`. With no drift the result is that of `gptq` with
the same damping.

Shapes: R rows of all linears together, C columns, K columns of a group. Weights are transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qaudit.core.column_loops import FUSED, LOOPS, PLAIN, obstacle
from qaudit.core.gptq_solver import Hessian, Start, column_order, factorize, solve
from qaudit.core.grid import Grid, as_stored, fit, group_notes, group_size
from qaudit.core.linears import (
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

_BY_SIZE = {"act_order": True, "act_group_aware": False}


@dataclass(frozen=True, kw_only=True)
class Gptq(Scheme):
    """Round columns in turn, each error made up for by later columns (GPTQ)."""

    name: ClassVar[str] = "gptq"
    version: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM
    rounds_columns: ClassVar[bool] = True
    damps_to_largest: ClassVar[bool] = False  # eigenvalue; else to the mean of the diagonal
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "paper-a": {**_BY_SIZE, "damp": 0.05, "scale_dtype": "float32"},
        "llm-compressor": {
            **_BY_SIZE,
            "static_groups": True,
            "damp": 0.01,
            "damp_increment": 0.0,
            "true_sequential": False,
            "all_tokens": True,
        },
        "autogptq": {**_BY_SIZE, "static_groups": False, "damp": 0.01, "damp_increment": 0.0},
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
        order = {"act_order": self.act_order, "act_group_aware": self.act_group_aware}
        order_C = column_order(gram_CC.diagonal(), self.group, **order)
        damping = (self.damp, self.damp_increment)
        hessian = factorize(
            gram_CC, order_C, linears.names, *damping, to_largest=self.damps_to_largest
        )
        start = None
        if inputs.drift_CC is not None and self.calibration is Calibration.BOTH_STREAMS:
            drift_CC = hessian.ordered(inputs.drift_CC.to(gram_CC))
            start = self._start(weight_CR, gram_CC.diagonal(), drift_CC, hessian)
        weight_CR[(gram_CC.diagonal() == 0).nonzero().flatten()] = 0
        loop, kernel_notes = {"auto": linears.column_loop, "true": FUSED}.get(self.fused, PLAIN), []
        if self.fused == "true":  # asked for by name
            kernel_notes = ["rounded by the fused kernel"]
            if reason := obstacle(weight_CR):
                loop = PLAIN
                kernel_notes = [f"rounded by the plain loop, not the fused kernel: {reason}"]
        codes_CR, grid_GR, group_of_C = solve(
            weight_CR,
            hessian,
            lay,
            group=self.group,
            static_groups=self.static_groups,
            scattered=self.act_order,
            round_block=LOOPS[loop],
            start=start,
        )
        counts = [len(weight) for weight in linears.weights.values()]
        scales = as_stored(grid_GR.scale.T, self.scale_dtype).split(counts)
        zeros = None if self.sym else grid_GR.low.T.neg().to(torch.uint8).split(counts)
        size = group_size(linears.columns, self.group)
        stored = {}
        for k, (name, codes_RC) in enumerate(
            zip(linears.weights, codes_CR.T.split(counts), strict=True)
        ):
            zeros_RG = None if zeros is None else zeros[k].contiguous()
            parts = (codes_RC.contiguous(), scales[k].contiguous(), zeros_RG)
            stored[name] = IntegerCodes(*parts, self.bits, size, group_of_C)
        notes = (*group_notes(linears.columns, self.group), *hessian.notes, *kernel_notes)
        return decoded(linears, stored, notes)

    def _start(
        self, weight_CR: Tensor, diagonal_C: Tensor, drift_CC: Tensor, hessian: Hessian
    ) -> Start | None:
        return None


class _ToFullPrecision(Gptq):
    """What both have in common: calibration on both streams, and no presets."""

    version: ClassVar[int] = 1
    calibration: ClassVar[Calibration] = Calibration.BOTH_STREAMS
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    remarks: ClassVar[Mapping[str, str]] = {}


@dataclass(frozen=True, kw_only=True)
class Gptaq(_ToFullPrecision):
    """Round columns in turn, making up for errors of earlier linears too (GPTAQ)."""

    name: ClassVar[str] = "gptaq"

    alpha: float = 0.25

    def _start(
        self, weight_CR: Tensor, diagonal_C: Tensor, drift_CC: Tensor, hessian: Hessian
    ) -> Start | None:
        if not self.alpha:
            return None
        # X U^T = D, and only what is above the diagonal of X feeds columns that come later.
        fed_CC = torch.linalg.solve_triangular(
            hessian.lower_CC, drift_CC, upper=False, left=False, unitriangular=True
        )
        fed_CC = torch.triu(fed_CC, 1).mul_(self.alpha / hessian.diagonal_C)
        return Start(pull_CC=fed_CC.T.contiguous())


@dataclass(frozen=True, kw_only=True)
class Qronos(_ToFullPrecision):
    """Undo what earlier linears changed, then round columns in turn (Qronos)."""

    name: ClassVar[str] = "qronos"
    damps_to_largest: ClassVar[bool] = True

    damp: float = 1e-6
    damp_increment: float = 1e-4

    def _start(
        self, weight_CR: Tensor, diagonal_C: Tensor, drift_CC: Tensor, hessian: Hessian
    ) -> Start | None:
        ordered_CR = weight_CR.index_select(0, hessian.order_C)
        pulled_CR = drift_CC.T @ ordered_CR  # of columns that never see an input, too
        first = diagonal_C[hessian.order_C[0]]
        ordered_CR[(diagonal_C[hessian.order_C] == 0).nonzero().flatten()] = 0
        first_R = ordered_CR[0] + pulled_CR[0] / torch.where(first == 0, 1.0, first)
        lower_CC = hessian.lower_CC
        solved = partial(torch.linalg.solve_triangular, unitriangular=True)
        moved_CR = solved(lower_CC.T, pulled_CR, upper=True).div_(hessian.diagonal_C[:, None])
        moved_CR = solved(lower_CC, moved_CR, upper=False)
        return Start(weight_CR=moved_CR.add_(ordered_CR), first_R=first_R)
