"""Rounding to nearest: no calibration, the floor every other scheme is held against.

Each group of each row is rounded to the nearest point of its own uniform grid
(`qaudit/core/grid.py` has the formulas). Symmetric by default, as GPTQModel and
llm-compressor round when asked for the plain scheme. Two presets name the settings of a
published study: `paper-b`, 4 bits, asymmetric, in groups of 128, and `paper-b-int8`, 8 bits,
symmetric, one group per row.

**HQQ**: round to nearest, with zero points that leave a few large errors and many small ones.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023), data-free:

    min over zero of  sum |w - (code - zero) * scale|^0.7        code = round(w / scale + zero)

Half-quadratic splitting takes steps that are each closed-form. With an error e per weight:

    e = sign(x) max(|x| - |x|^(0.7 - 1) / 10, 0)                 x = w - (code - zero) * scale
    zero = mean over the group of  code - (w - e) / scale

up to 20 steps, until the mean of |x| over the whole weight stops falling. These are the defaults of
the `hqq` package since 0.2.7, on a CPU; before, and as published, the 10 grew by 1 % each step, and
on CUDA the steps are in float16. Its scale is (max - min) / (2^bits - 1), and at 4 bits the first
zero point is rounded. Zero points are no integers: they are stored as scales are, and both are
rounded to `scale_dtype` after the codes are chosen, as in the package.

An |x| below (1 / 10)^(1 / 1.3) = 0.17 leaves no error e. Usual weights have none above it: their
powers are not taken, and each zero point moves by the mean error of its group.

Different: a group is of columns of one row (the package's `axis=1`), and a last group that does
not fill up is one of its own, where the package lets groups run on into the next row.

Shapes: R rows, C columns, G groups, K columns of one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from qaudit.core.grid import as_stored, group_notes, group_size, quantize_groups, split_groups
from qaudit.core.linears import Linears, Quantized, StoredWeight, refuse_nonfinite, store_each
from qaudit.core.scheme import Scheme
from qaudit.support.lazy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class RoundToNearest(Scheme):
    """Round to the nearest point of a uniform grid; no calibration."""

    name: ClassVar[str] = "rtn"
    version: ClassVar[int] = 2
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "paper-b": {"bits": 4, "group": 128, "sym": False, "scale_dtype": "float32"},
        "paper-b-int8": {"bits": 8, "group": -1, "sym": True, "scale_dtype": "float32"},
    }
    remarks: ClassVar[Mapping[str, str]] = {
        "paper-b": "2604.15167 as second-hand readings describe it; its error is taken for the "
        "relative change of perplexity, which is inferred",
        "paper-b-int8": "2604.15167 as second-hand readings describe it; INT8 there differs from "
        "INT4 in granularity and symmetry too",
    }

    bits: int
    group: int = 128
    sym: bool = True
    scale_dtype: str = "bf16"

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        store = partial(quantize_groups, symmetric=self.sym, scale_dtype=self.scale_dtype)
        store = partial(store, bits=self.bits, group=self.group)
        return store_each(linears, store, group_notes(linears.columns, self.group))


POWER = 0.7
BETA = 10.0
NO_ERROR = 0.99 * BETA ** (1 / (POWER - 2))  # below this e is 0, however it is rounded
STEPS = 20
ROUNDED_FIRST = 4  # bits at which the first zero point is rounded
SMALLEST_RANGE, LARGEST_INVERSE_SCALE = 1e-4, 2e4
_CORE_ELEMENTS = 2**16  # of five tensors at once


@dataclass(frozen=True, eq=False)
class FloatZeroCodes(StoredWeight):
    """Codes on one uniform grid for each group of each row, whose zero point is no integer."""

    codes_RC: Tensor  # uint8, 0 to 2^bits - 1
    scales_RG: Tensor
    zeros_RG: Tensor
    bits: int
    group: int  # columns of a full group; the last group can be smaller

    def decode(self) -> Tensor:
        wide = torch.promote_types(self.scales_RG.dtype, torch.float32)
        columns = self.codes_RC.shape[1]
        scales_RC, zeros_RC = (
            part.to(wide).repeat_interleave(self.group, 1)[:, :columns]
            for part in (self.scales_RG, self.zeros_RG)
        )
        return self.codes_RC.to(wide).sub_(zeros_RC).mul_(scales_RC)

    @property
    def nbits(self) -> int:
        floats = (self.scales_RG, self.zeros_RG)
        each = sum(8 * part.element_size() * part.numel() for part in floats)
        return self.codes_RC.numel() * self.bits + each


@dataclass(frozen=True, kw_only=True)
class Hqq(Scheme):
    """Round to nearest with zero points fitted by half-quadratic steps (HQQ); no calibration."""

    name: ClassVar[str] = "hqq"
    version: ClassVar[int] = 2

    bits: int
    group: int = 64
    scale_dtype: str = "bf16"

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        return store_each(linears, self._fit, group_notes(linears.columns, self.group))

    def _fit(self, weight_RC: Tensor) -> FloatZeroCodes:
        weight_RC = weight_RC.contiguous()
        parts = [_HqqPart(part_RGK, self.bits) for part_RGK in split_groups(weight_RC, self.group)]
        on_host, device = weight_RC.device.type == "cpu", weight_RC.device
        smallest = torch.full((), float("inf"), dtype=torch.float64, device=device)
        moves = torch.ones((), dtype=torch.bool, device=device)
        for _ in range(STEPS):
            errors = []
            for part in parts:
                before = part.zero.clone()
                errors.append(part.step().double())
                torch.where(moves, part.zero, before, out=part.zero)
            error = sum(errors) / weight_RC.numel()
            # Steps after the last that lowers the error move nothing: a GPU, which would wait to be
            # told, takes them.
            moves = moves & (error < smallest)
            if on_host and not moves:
                break
            smallest = torch.where(moves, error, smallest)
        results = zip(*(part.result() for part in parts), strict=True)
        codes_RC, *floats = (torch.cat(tensors, 1) for tensors in results)
        scales_RG, zeros_RG = (as_stored(float_RG, self.scale_dtype) for float_RG in floats)
        size = group_size(weight_RC.shape[1], self.group)
        return FloatZeroCodes(codes_RC, scales_RG, zeros_RG, self.bits, size)


class _HqqPart:
    """Groups of one size, and their zero points so far."""

    def __init__(self, weight_RGK: Tensor, bits: int) -> None:
        self._weight_RGK, self._top = weight_RGK, 2**bits - 1
        self._on_host = weight_RGK.device.type == "cpu"
        smallest = weight_RGK.amin(-1, keepdim=True)
        extent = weight_RGK.amax(-1, keepdim=True) - smallest
        inverse = torch.where(extent <= SMALLEST_RANGE, 1.0, self._top / extent)
        self._inverse = inverse.clamp_(max=LARGEST_INVERSE_SCALE)
        self._scaled_RGK = weight_RGK * self._inverse
        self._magnitude = torch.empty_like(weight_RGK)
        self.zero = -smallest * self._inverse
        if bits == ROUNDED_FIRST:
            self.zero.round_()

    def step(self) -> Tensor:
        """Move the zero points once; return the sum of the errors before."""
        rows, size = len(self._weight_RGK), self._weight_RGK.numel()
        if self._on_host:
            rows = max(1, _CORE_ELEMENTS * rows // size)
        tensors = (self._weight_RGK, self._scaled_RGK, self._inverse, self.zero, self._magnitude)
        # Some rows at a time, few enough to stay in a core's cache.
        for weight, scaled, inverse, zero, magnitude in zip(
            *(tensor.split(rows) for tensor in tensors), strict=True
        ):
            codes = (scaled + zero).round_().clamp_(0, self._top)
            error = torch.sub(codes, zero).div_(inverse)
            torch.sub(weight, error, out=error)
            torch.abs(error, out=magnitude)
            # A GPU would wait to be told, and powers cost it little: of small errors they add 0.
            if not self._on_host or magnitude.amax() >= NO_ERROR:
                power = magnitude.pow(POWER - 1) / BETA
                large = torch.sign(error) * (magnitude - power).clamp_(min=0)
                scaled = (weight - large) * inverse
            torch.mean(codes.sub_(scaled), -1, keepdim=True, out=zero)
        return self._magnitude.sum()

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes (R, C), scales and zero points (R, G)."""
        codes = (self._scaled_RGK + self.zero).round_().clamp_(0, self._top)
        codes_RC = codes.to(torch.uint8).flatten(1)
        return codes_RC, (1 / self._inverse).flatten(1), self.zero.flatten(1)
