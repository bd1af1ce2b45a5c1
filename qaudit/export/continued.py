"""A scheme whose codes are on disk for the blocks that an interrupted export wrote."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from qaudit.core.scheme import Linears, Quantized, Scheme, decoded
from qaudit.export.formats import unpacked
from qaudit.export.parts import Parts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Continued:
    """Quantizes as `scheme` does, and reads what `parts` hold of it.

    Codes and scales give the same dense weights as before, so that later blocks are calibrated on
    the same inputs.
    """

    scheme: Scheme
    parts: Parts
    config: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheme, name)

    def quantize(self, linears: Linears) -> Quantized:
        self.parts.enter(linears.block)
        tensors = self.parts.tensors(linears.block)
        if tensors is None:
            return self.scheme.quantize(linears)
        stored = {}
        for name, weight_RC in linears.weights.items():
            linear = self.parts.linear(linears.block, name, tuple(weight_RC.shape))
            read = partial(_read, tensors, weight_RC.device)
            stored[name] = unpacked(self.parts.form, linear, read, self.config)
        return decoded(linears, stored)


def _read(tensors: Any, device: Any, name: str) -> Tensor:
    tensor: Tensor = tensors[name].to(device)
    return tensor
