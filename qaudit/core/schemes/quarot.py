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
from typing import ClassVar

from qaudit.core.grid import SHARES, WHOLE, Grid, fit_searched, group_notes, quantize_groups
from qaudit.core.linears import Linears, Quantized, decoded, refuse_nonfinite
from qaudit.core.rotation import fused
from qaudit.core.scheme import Calibration, Scheme, check_bits, check_group
from qaudit.core.schemes.gptq import Gptq
from qaudit.errors import SchemeError
from qaudit.support.lazy import Tensor, torch

UNROUNDED = 16
CACHE_CLIP = 0.95


def check_clip(clip: float) -> None:
    """Refuse to cut a largest magnitude to nothing, or to more than itself."""
    if not 0 < clip <= 1:
        raise SchemeError(f"a clip of {clip} is out of range", hint="use 0 < clip <= 1")


def round_tokens(x: Tensor, bits: int, clip: float = 1.0) -> Tensor:
    """Round each token on a symmetric grid of integers, the largest cut to a share of itself."""
    top = 2 ** (bits - 1) - 1
    scale = clip * x.abs().amax(-1, keepdim=True) / top
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.div(x, scale).round_().clamp_(-top - 1, top).mul_(scale)


@dataclass(frozen=True, kw_only=True)
class SearchedGptq(Gptq):
    """GPTQ onto symmetric grids whose scales are the best of several shares of the range."""

    act_group_aware: bool = False
    search: bool = True

    @property
    def trials(self) -> int:
        return len(SHARES) if self.search else 0

    def _fit(self, weight_KR: Tensor) -> Grid:
        return searched(weight_KR, self.bits, dim=0, search=self.search)


def searched(weight: Tensor, bits: int, *, dim: int, search: bool) -> Grid:
    """Lay symmetric grids over the best share of a range, or over all of it."""
    shares = SHARES if search else WHOLE
    return fit_searched(weight, bits, dim=dim, scale_dtype="bf16", shares=shares)


@dataclass(frozen=True, kw_only=True)
class QuarotNearest(Scheme):
    """Rotate, then round weights to nearest and activations by token."""

    name: ClassVar[str] = "quarot-rtn"
    version: ClassVar[int] = 3

    bits: int
    act: int = 4
    group: int = -1
    clip: float = 0.9
    search: bool = True
    rotate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits)
        check_group(self.group)
        if self.act != UNROUNDED:
            check_bits(self.act)
        check_clip(self.clip)

    @property
    def transforms_inputs(self) -> bool:
        return self.rotate

    @property
    def trials(self) -> int:
        return len(SHARES) if self.search else 0

    @property
    def rotates_outputs(self) -> bool:
        """Round v, and what writes to the residual, in rotated rows where a block allows it."""
        return self.rotate

    @property
    def rotates_heads(self) -> bool:
        """Round keys behind R3 and values behind R2, as published."""
        return self.rotate

    @property
    def cache_clip(self) -> float:
        """Return the share to which the range of cached keys and values is cut."""
        return CACHE_CLIP

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

        def inputs(x: Tensor) -> Tensor:
            return self._rounded(basis.inputs(x)).to(x.dtype)

        notes = (*quantized.notes, *self._notes(linears))
        return replace(quantized, weights=weights, inputs=inputs, notes=notes)

    def _round(self, linears: Linears) -> Quantized:
        lay = partial(searched, bits=self.bits, dim=-1, search=self.search)
        stored, notes = {}, dict[str, None]()
        for name, weight in linears.weights.items():
            wide_RC = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
            stored[name] = quantize_groups(
                wide_RC, self.bits, self.group, symmetric=True, scale_dtype="bf16", lay=lay
            )
            notes |= dict.fromkeys(group_notes(weight.shape[1], self.group))
        return decoded(linears, stored, tuple(notes))

    def _notes(self, linears: Linears) -> tuple[str, ...]:
        if linears.rows is None or any(
            r.start == 0 and r.stop == r.width for r in linears.rows.values()
        ):
            return ()
        return (
            "no rotation of the residual is free in this model: each is in front of its linears",
        )

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
        rounding = SearchedGptq(
            bits=self.bits, group=self.group, damp=self.damp, search=self.search
        )
        return rounding.quantize(linears)
