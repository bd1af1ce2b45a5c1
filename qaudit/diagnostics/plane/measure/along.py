"""Weights on the way to their quantized selves, and on the way to those of another checkpoint.

A point along the direction of quantization is, to the engine, one more scheme: `Along` makes
W + b * u of a weight W, where u is what `Anchor` saw the real scheme do to it. So every point of
a slice goes through the blocks side by side, nothing is calibrated twice, and no model has to be
held whole. A point along the direction to another checkpoint is a source of weights, merged as
they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qaudit.core.scheme import Calibration, Linears, Quantized, Scheme
from qaudit.engine.stand_in import StandIn
from qaudit.errors import SchemeError
from qaudit.model.blocks import Weights
from qaudit.model.merged import must_agree, must_be_equal

Place = tuple[int, str]
"""A block, and the name of a linear in it."""


@dataclass(frozen=True, kw_only=True)
class Anchor(StandIn):
    """Quantize as a scheme does, and remember by how much every weight moved."""

    keeps: bool  # all blocks, and not only those that no point has read yet
    moved: dict[Place, Tensor] = field(default_factory=dict, compare=False)
    read: set[int] = field(default_factory=set, compare=False)

    def __post_init__(self) -> None:
        """Calibrate as the scheme does."""
        super().__post_init__()
        object.__setattr__(self, "calibration", self.inner.calibration)

    def quantize(self, linears: Linears) -> Quantized:
        """Quantize the linears, and remember what that did to them."""
        quantized = self.inner.quantize(linears)
        if quantized.forwards:
            raise SchemeError(
                f"`{self.inner.short}` quantizes activations too: no weights are its model",
                hint="name another scheme, as `--diagnose plane:scheme=gptq-3bit`",
            )
        if not self.keeps:
            for place in [p for p in self.moved if p[0] in self.read and p[0] != linears.block]:
                del self.moved[place]
        for name, weight_RC in linears.weights.items():
            after_RC = quantized.weights[name].to(weight_RC.device, torch.float32)
            self.moved[linears.block, name] = after_RC - weight_RC.float()
        return quantized


@dataclass(frozen=True, kw_only=True)
class Along(Scheme):
    """Go a part of the way that quantization moves every weight."""

    anchor: Anchor
    part: float

    def __post_init__(self) -> None:
        """Go by the scheme's name and the part."""
        object.__setattr__(self, "name", self.anchor.name)
        object.__setattr__(self, "calibration", Calibration.NONE)

    @property
    def short(self) -> str:
        """Name the part."""
        return f"{self.part:g} of {self.anchor.short}"

    @property
    def spec(self) -> str:
        """Name the part."""
        return f"{self.part!r} of {self.anchor.spec}"

    @property
    def remark(self) -> str | None:
        """No remark: the scheme has its own."""
        return None

    def quantize(self, linears: Linears) -> Quantized:
        """Move every weight by a part of what the scheme moved it by."""
        self.anchor.read.add(linears.block)
        moved = {
            name: (weight_RC.float() + self.part * self._moved(linears.block, name)).to(
                weight_RC.dtype
            )
            for name, weight_RC in linears.weights.items()
        }
        return Quantized(moved, bits=0)

    def _moved(self, block: int, name: str) -> Tensor:
        return self.anchor.moved[block, name]


class Between:
    """Weights a part of the way to those of another checkpoint."""

    def __init__(
        self, labels: tuple[str, str], weights: Weights, other: Weights, part: float
    ) -> None:
        """Refuse a checkpoint whose tensors have other names or shapes."""
        self._labels, self._weights, self._other, self._part = labels, weights, other, part
        must_agree(labels[0], weights, labels[1], other)

    def names(self) -> Sequence[str]:
        """Return the names of all tensors."""
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._weights.shape(name)

    def read(self, name: str) -> Tensor:
        """Read a tensor of both, and go a part of the way."""
        here, there = self._weights.read(name), self._other.read(name)
        if not here.is_floating_point():
            must_be_equal(name, self._labels[0], here, self._labels[1], there)
            return here
        return here.float() + self._part * (there.float() - here.float())
