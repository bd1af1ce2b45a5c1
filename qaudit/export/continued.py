"""A scheme whose codes are on disk for the blocks that an interrupted export wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Calibration, Scheme
from qaudit.export.parts import Parts


@dataclass(frozen=True, eq=False)
class Continued:
    """Quantizes as `scheme` does, and reads what `parts` hold of it.

    Files hold the same dense weights as before, so that later blocks are calibrated on the same
    inputs. A scheme that reads full-precision inputs needs none of them.
    """

    scheme: Scheme
    parts: Parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheme, name)

    def quantize(self, linears: Linears) -> Quantized:
        self.parts.enter(linears.block)
        if not self.parts.holds(linears.block):
            return self.scheme.quantize(linears)
        if self.scheme.calibration is not Calibration.OWN_STREAM:
            return Quantized(linears.weights, bits=0)
        weights = {
            name: self.parts.dense(linears.block, name, weight_RC)
            for name, weight_RC in linears.weights.items()
        }
        return Quantized(weights, bits=0)
