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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qaudit.core.linears import Linears, Quantized, sampled_inputs

if TYPE_CHECKING:
    from torch import Tensor, nn

STEP_TOKENS = 1024
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
    # Run the block as if groups were installed; gradients reach their weights and inputs, where
    # they are enabled: the engine disables them around `train`.
    run: Callable[[Tensor, Iterable[Quantized]], Tensor]
    module: nn.Module  # to be left as it is
    called: Callable[[Tensor], tuple[tuple[Any, ...], Mapping[str, Any]]]  # with what, for hidden


def alone(linears: Linears, scheme: str) -> WholeBlock:
    """Return a block of one group, whose output is the products with a sample of tokens."""
    import torch

    sample_1TC = sampled_inputs(linears, scheme)[None]

    def products(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        parts = [x @ weight_RC.to(x).T for weight_RC in weights.values()]
        return torch.cat(parts, -1)

    def run(x: Tensor, quantized: Iterable[Quantized]) -> Tensor:
        weights, change = linears.weights, None
        for one in quantized:
            weights, change = {**linears.weights, **one.weights}, one.inputs
        return products(x if change is None else change(x), weights)

    weights = {name: weight_RC.detach() for name, weight_RC in linears.weights.items()}
    valid_BT = torch.ones(sample_1TC.shape[:2], dtype=torch.bool)
    batch = MiniBatch(sample_1TC, products(sample_1TC, weights), valid_BT)
    return WholeBlock(
        groups=(linears,),
        batches=(batch,),
        calibrated=lambda: (linears,),
        run=run,
        module=_module(weights, products),
        called=lambda hidden: ((hidden,), {}),
    )


def _module(
    weights: Mapping[str, Tensor], products: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
) -> nn.Module:
    """Return a module with linears of these names side by side."""
    import torch
    from torch import nn

    class Side(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.get_submodule(name)(x) for name in weights], -1)

    side = Side()
    for name, weight_RC in weights.items():
        parent: nn.Module = side
        *path, last = name.split(".")
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        rows, columns = weight_RC.shape
        linear = nn.Linear(columns, rows, bias=False, device="meta")
        linear.weight = nn.Parameter(weight_RC.clone(), requires_grad=False)
        parent.add_module(last, linear)
    return side
