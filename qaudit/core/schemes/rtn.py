"""Rounding to nearest: no calibration, the floor every other scheme is held against.

Each group of each row is rounded to the nearest point of its own uniform grid
(`qaudit/core/grid.py` has the formulas). Symmetric by default, as GPTQModel and
llm-compressor round when asked for the plain scheme. Two presets name the settings of a
published study: `paper-b`, 4 bits, asymmetric, in groups of 128, and `paper-b-int8`, 8 bits,
symmetric, one group per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.grid import group_notes, quantize_groups
from qaudit.core.linears import Linears, Quantized, decoded, refuse_nonfinite
from qaudit.core.scheme import Scheme


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
        stored = {
            name: quantize_groups(
                weight_RC, self.bits, self.group, symmetric=self.sym, scale_dtype=self.scale_dtype
            )
            for name, weight_RC in linears.widened()
        }
        return decoded(linears, stored, group_notes(linears.columns, self.group))
