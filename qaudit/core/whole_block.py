"""A whole block, for a scheme that learns on what the block returns.

A group of linears sees its own product and nothing of what becomes of it. A scheme whose
`calibration` is `Calibration.WHOLE_BLOCK` first sees the block around all of its groups
(`Scheme.train`): what its own, already quantized stream brings to the entrance, and what the block
of the unquantized model returns for the same tokens. It returns what quantizes the groups, which
the engine then calls group by group, each on inputs that went through those before it.

Where a caller has one group and no block, `alone` makes a block of it, which returns the products
of its linears with a sample of tokens.

Shapes: B windows, T tokens of each, D hidden, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from qaudit.core.linears import Linears, Quantized, sampled_inputs
from qaudit.support.lazy import Tensor, torch

STEP_TOKENS = 512
"""Tokens of a mini-batch, unless a single window is longer."""

Quantize = Callable[[Linears], Quantized]
"""Quantize a group of the block that was learned on."""


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Some windows at the entrance of a block, and what the unquantized model makes of them."""

    hidden_BTD: Tensor  # in the scheme's own stream
    target_BTD: Tensor  # behind the block of the unquantized model, in the unquantized stream
    valid_BT: Tensor  # which positions hold a token of a window


@dataclass(frozen=True, eq=False)
class WholeBlock:
    """A block with full-precision weights, its mini-batches, and what runs it."""

    groups: tuple[Linears, ...]  # without statistics
    batches: Sequence[MiniBatch]  # read when they are asked for, the same in every run
    calibrated: Callable[[], tuple[Linears, ...]]  # with statistics: another pass of calibration
    # Run the block as if groups were installed; gradients reach their weights, forwards and inputs,
    # where they are enabled: the engine disables them around `train`.
    run: Callable[[Tensor, Iterable[Quantized]], Tensor]


def alone(linears: Linears, scheme: str) -> WholeBlock:
    """Return a block of one group, whose output is the products with a sample of tokens."""
    sample_1TC = sampled_inputs(linears, scheme)[None]
    plain = {
        name: partial(_product, weight.detach().contiguous())
        for name, weight in linears.weights.items()
    }

    def run(x: Tensor, quantized: Iterable[Quantized]) -> Tensor:
        change = None
        forwards: dict[str, Callable[[Tensor], Tensor]] = {**plain}
        for part in quantized:
            change = part.inputs
            forwards |= {name: partial(_product, part.weights[name]) for name in part.weights}
            forwards |= part.forwards
        read = x if change is None else change(x)
        return torch.cat([forward(read) for forward in forwards.values()], -1)

    valid_BT = torch.ones(sample_1TC.shape[:2], dtype=torch.bool)
    batch = MiniBatch(sample_1TC, run(sample_1TC, ()), valid_BT)
    return WholeBlock(groups=(linears,), batches=(batch,), calibrated=lambda: (linears,), run=run)


def _product(weight_RC: Tensor, x: Tensor) -> Tensor:
    return x @ weight_RC.to(x).T
