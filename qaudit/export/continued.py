"""A scheme whose codes are on disk for the blocks that an interrupted export wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Scheme
from qaudit.core.whole_block import Quantize, WholeBlock
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
        return self._quantize(linears, self.scheme.quantize)

    def train(self, block: WholeBlock) -> Quantize:
        if self.parts.holds(block.groups[0].block):
            return self.quantize
        quantize = self.scheme.train(block)
        return lambda linears: self._quantize(linears, quantize)

    def _quantize(self, linears: Linears, quantize: Quantize) -> Quantized:
        self.parts.enter(linears.block)
        if not self.parts.holds(linears.block):
            return quantize(linears)
        if not self.scheme.calibration.has_stream:
            return Quantized(linears.weights, bits=0)
        weights = {
            name: self.parts.dense(linears.block, name, weight_RC)
            for name, weight_RC in linears.weights.items()
        }
        return Quantized(weights, bits=0)
