"""Mixtures: linears of different bits, chosen within a budget of stored bits per weight.

    gptq-mix:budget=3.5             3 to 8 bits, linears that runtimes fuse have the same
    gptq-mix:budget=3.25:members=23456:tie=none
    gptq-mix:table=table.json       the table of another audit, of its `evidence/tables`

Each linear is rounded by the scheme that the name begins with. Which bits it gets is chosen before
the pass, from calibration text alone (`qaudit/core/mixture.py`, `qaudit/engine/mixing.py`): linears
are quantized on some of it and scored on other, because GPTQ fits the tokens that it sees. The
budget counts scales and zero points. Rows do not touch each other in rounding to nearest or GPTQ,
so that linears which read the same input share statistics and may differ in bits (`tie=none`);
AWQ's share scales, too, and are always tied.

The class is that of the whole bits of the budget: 3 for 3.0 and for 3.75. A mixture is judged there
if it is no larger than the largest file of one width that was measured.

Two bits are the risk: at 3.0 bits on a model of 135M they lost more than 3 bits everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from qaudit.core.linears import CodeLayout
from qaudit.core.mixture import FUSED, Mixture
from qaudit.core.scheme import Calibration, Scheme
from qaudit.core.schemes.awq import Awq
from qaudit.core.schemes.gguf import GgufQ3K, GgufQ4K, GgufQ5K, GgufQ6K, GgufQ8
from qaudit.core.schemes.gptq import Gptq
from qaudit.core.schemes.nearest import Hqq, RoundToNearest
from qaudit.errors import SchemeError


@dataclass(frozen=True, kw_only=True)
class _OfBits(Mixture):
    """A mixture of members of the scheme that it derives from, too, and whose parameters it has."""

    bits: ClassVar[int] = 4  # of none

    def member(self, bits: int) -> Scheme:
        base: Any = type(self).__bases__[1]
        shared = {f.name: getattr(self, f.name) for f in fields(base) if f.name != "bits"}
        made: Scheme = base(bits=bits, **shared)
        return made


@dataclass(frozen=True, kw_only=True)
class RtnMix(_OfBits, RoundToNearest):
    """Round to nearest, each linear to bits of its own; the bits need calibration text."""

    name: ClassVar[str] = "rtn-mix"


@dataclass(frozen=True, kw_only=True)
class GptqMix(_OfBits, Gptq):
    """Round columns in turn as GPTQ does, each linear to bits of its own."""

    name: ClassVar[str] = "gptq-mix"


@dataclass(frozen=True, kw_only=True)
class HqqMix(_OfBits, Hqq):
    """Round to nearest with fitted zero points as HQQ does, each linear to bits of its own."""

    name: ClassVar[str] = "hqq-mix"


@dataclass(frozen=True, kw_only=True)
class AwqMix(_OfBits, Awq):
    """Scale and clip as AWQ does, each group of linears to bits of its own."""

    name: ClassVar[str] = "awq-mix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tie != FUSED:
            raise SchemeError(
                "linears that read the same input share the scales of AWQ, and so their bits",
                hint="leave out tie=none, or use gptq-mix",
            )


@dataclass(frozen=True, kw_only=True)
class GgufMix(Mixture):
    """Round as llama.cpp's types Q3_K to Q6_K and Q8_0 do, each linear to a type of its own."""

    name: ClassVar[str] = "gguf-mix"
    one_width_of_experts: ClassVar[bool] = False  # a tensor of a layer has a type of its own

    importance: bool = False

    @property
    def calibration(self) -> Calibration:  # type: ignore[override]
        return self.member(self.widths[0]).calibration

    @property
    def layout(self) -> CodeLayout:
        return CodeLayout("gguf", kind=f"Q{int(self.budget)}_K")

    def member(self, bits: int) -> Scheme:
        types = {3: GgufQ3K, 4: GgufQ4K, 5: GgufQ5K, 6: GgufQ6K}
        if bits == 8:
            return GgufQ8()
        if bits not in types:
            raise SchemeError(
                f"`{self.name}` has no type of {bits} bits", hint="use members=34568, or some of it"
            )
        return types[bits](importance=self.importance)
