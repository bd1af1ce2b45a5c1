"""How much memory products with the Hessian take, and what is done where there is less.

Beside the weights there are vectors as long as them (`hessian.py`), the hidden states and their
gradients between the blocks, and the graph of one block or of the head through two backward
passes. What of these is alive at the worst moment was read off `python -m benchmarks.curvature`
at several shapes; the factors below stay above all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from qaudit.diagnostics.curvature.parameters import Curvature
from qaudit.errors import MachineError
from qaudit.host import available_nbytes
from qaudit.model.device import free_nbytes
from qaudit.model.routes import Weights
from qaudit.support.sizes import size

VECTORS = 6  # weights, v, the sum, gradients of both passes, and what is being freed
OF_HIDDEN, OF_INNER, OF_ATTENTION, OF_LOGITS = 40, 14, 19, 7  # copies alive in a graph
ITEMSIZE = 4
POSITIONS = 4096  # side by side at most
SHARE = 0.9  # of what is free


@dataclass(frozen=True)
class PassShape:
    """What of a model decides how much its second derivatives take."""

    parameters: int
    blocks: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any, weights: Weights) -> PassShape:
        """Read a configuration of `transformers`; what is missing there has its usual value."""
        text = config.get_text_config()
        hidden = int(text.hidden_size)
        inner = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None)
        return cls(
            parameters=sum(math.prod(weights.shape(name)) for name in weights.names()),
            blocks=int(text.num_hidden_layers),
            hidden=hidden,
            inner=int(inner or 4 * hidden),
            heads=int(getattr(text, "num_attention_heads", None) or 1),
            vocabulary=int(text.vocab_size),
        )

    @property
    def vector_nbytes(self) -> int:
        """What a vector takes that is as long as the model has parameters."""
        return ITEMSIZE * self.parameters


@dataclass(frozen=True)
class Room:
    """How products are made so that they fit."""

    device: torch.device
    windows: int  # side by side
    notes: tuple[str, ...] = ()


def product_nbytes(shape: PassShape, windows: int, length: int) -> int:
    tokens = windows * length
    between = 2 * (shape.blocks + 1) * tokens * shape.hidden
    block = tokens * (
        OF_HIDDEN * shape.hidden + OF_INNER * shape.inner + OF_ATTENTION * shape.heads * length
    )
    head = OF_LOGITS * tokens * shape.vocabulary
    return VECTORS * shape.vector_nbytes + ITEMSIZE * (between + max(block, head))


def find_room(shape: PassShape, length: int, parameters: Curvature, device: torch.device) -> Room:
    """Make things smaller until they fit, or refuse with what they would take."""
    notes: list[str] = []
    if device.type == "mps":
        device = torch.device("cpu")
        notes.append("computed on the CPU: this device has no double precision")
    free = room_nbytes(device)
    basis = parameters.steps * shape.vector_nbytes if parameters.eigenvalues else 0
    most = max(1, POSITIONS // length)
    windows = next(_fitting(shape, most, length, free - basis), 0)
    if not windows:
        needed = product_nbytes(shape, 1, length)
        more = f", and eigenvalues {size(basis)} more" if basis else ""
        smaller = "the trace alone with `curvature:eigenvalues=0`, or fewer `steps`"
        raise MachineError(
            f"curvature of {shape.parameters:,} parameters takes {size(needed)} of memory{more}; "
            f"{size(free)} are free",
            hint=f"measure {smaller}"
            if needed <= free
            else "use a machine with more memory, or a shorter `--context`",
        )
    if windows < most:
        notes.append(f"{windows} of {most} windows side by side, to fit in memory")
    return Room(device, windows, tuple(notes))


def _fitting(shape: PassShape, most: int, length: int, free: int) -> Iterator[int]:
    return (n for n in range(most, 0, -1) if product_nbytes(shape, n, length) <= free)


def room_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(SHARE * free_nbytes(device))
    return int(SHARE * available_nbytes())
