"""QuaRot: rotate inputs and weights so that nothing stands out, then round both to few bits.

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2404.00456). `quarot`
rounds weights by GPTQ, `quarot-rtn` to nearest; both round activations by token, symmetric, with
the largest magnitude of a token cut to 0.9 of itself, as published. `rotate=false` is the same
without rotations: what integers of four bits do by themselves. `act=16` leaves activations as they
are. `search=false` leaves out the search for the scales of weights.

Exact: what is rounded is what QuaRot rounds, whether a rotation is folded or online
(`qaudit/core/rotation.py`): inputs without the weight of the norm in front, outputs that a block
lets one rotate, cached keys and values (`kv=int4`) behind R3 and R2, their ranges cut to 0.95. A
scale of weights is the best of 80, one a row (`--w_clip`, `qaudit/core/grid.py`). A post-norm
model has no free R1: it is rotated in front of each linear, and a note says so.

Simplified:
- rotations are Walsh-Hadamard beside Hartley, fixed, where QuaRot has random signs and tables.
- statistics of GPTQ are of inputs that are rotated and not rounded; blocks before are rounded.
- a group of a cache is a head, also where a head has more than the 128 numbers of a group there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from qaudit.core.activations import round_tokens
from qaudit.core.grid import fit_searched, group_notes, quantize_groups
from qaudit.core.linears import Linears, Quantized, decoded, refuse_nonfinite
from qaudit.core.rotation import fused
from qaudit.core.scheme import UNROUNDED, Calibration, Scheme
from qaudit.core.schemes.gptq import Gptq
from qaudit.support.lazy import Tensor

CACHE_CLIP = 0.95


def round_columns(
    linears: Linears, bits: int, *, group: int = -1, search: bool = True, **settings: Any
) -> Quantized:
    """Round by GPTQ onto symmetric grids whose scales are the best of several shares of a range."""
    rounding = Gptq(bits=bits, group=group, act_group_aware=False, **settings)
    return rounding.rounded(linears, partial(fit_searched, bits=bits, dim=0, search=search))


@dataclass(frozen=True, kw_only=True)
class QuarotNearest(Scheme):
    """Rotate, then round weights to nearest and activations by token."""

    name: ClassVar[str] = "quarot-rtn"
    version: ClassVar[int] = 3
    cache_clip: ClassVar[float] = CACHE_CLIP

    bits: int
    act: int = 4
    group: int = -1
    clip: float = 0.9
    search: bool = True
    rotate: bool = True

    @property
    def rotates_outputs(self) -> bool:
        """Round v, and what writes to the residual, in rotated rows where a block allows it."""
        return self.rotate

    @property
    def rotates_heads(self) -> bool:
        """Round keys behind R3 and values behind R2, as published."""
        return self.rotate

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        if not self.rotate:
            rounded = None if self.act == UNROUNDED else self._rounded
            return replace(self._round(linears), inputs=rounded)
        basis = fused(linears)
        quantized = self._round(basis.linears)
        weights = {
            name: basis.outwards(name, quantized.weights[name]).to(weight.dtype)
            for name, weight in linears.weights.items()
        }
        notes = quantized.notes
        if linears.rows is not None and not any(
            r.start == 0 and r.stop == r.width for r in linears.rows.values()
        ):
            missing = "no rotation of the residual is free in this model"
            notes += (f"{missing}: each is in front of its linears",)
        return replace(
            quantized,
            weights=weights,
            inputs=lambda x: self._rounded(basis.inputs(x)).to(x.dtype),
            notes=notes,
        )

    def _round(self, linears: Linears) -> Quantized:
        lay = partial(fit_searched, bits=self.bits, dim=-1, search=self.search)
        stored = {
            name: quantize_groups(
                weight_RC, self.bits, self.group, symmetric=True, scale_dtype="bf16", lay=lay
            )
            for name, weight_RC in linears.widened()
        }
        return decoded(linears, stored, group_notes(linears.columns, self.group))

    def _rounded(self, x: Tensor) -> Tensor:
        if self.act == UNROUNDED:
            return x
        return round_tokens(x.float(), self.act, self.clip).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Quarot(QuarotNearest):
    """Rotate, then round weights by GPTQ and activations by token (QuaRot)."""

    name: ClassVar[str] = "quarot"
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM
    rounds_columns: ClassVar[bool] = True

    damp: float = 0.01

    def _round(self, linears: Linears) -> Quantized:
        return round_columns(
            linears, self.bits, group=self.group, search=self.search, damp=self.damp
        )
