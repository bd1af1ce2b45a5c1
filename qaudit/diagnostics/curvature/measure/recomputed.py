"""A block whose inside is computed again whenever it is differentiated: once, or twice.

A second derivative by two backward passes keeps what the first of them computed in every block,
and `torch.utils.checkpoint` does not help: it recomputes the forward pass during the first
backward pass, whose graph then holds on to all of it. Here a block's gradient is a checkpointed
function too: of each block there remain its input and the gradient that reached its output, and
the graph of at most one block exists at any time, through both passes. The price is that a block
is run forward and backward once more.

A block whose arguments lead to parameters by other ways than its hidden states (shared caches)
is left as it is: right, and as large as it was.

Shapes: B windows, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[..., Tensor]
"""Hidden states and parameters -> hidden states; nothing else of it is differentiated."""

Grads = tuple[Tensor | None, ...]


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_Backward.apply(ctx.run, grads[0], *ctx.saved_tensors)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, grad: Tensor, *inputs: Tensor) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad, *inputs)
        return _gradients(run, grad, _fresh(inputs), create_graph=False)

    @staticmethod
    def backward(ctx: Any, *seconds: Tensor | None) -> Any:
        grad, *inputs = _fresh(ctx.saved_tensors)
        first = _gradients(ctx.run, grad, inputs, create_graph=True)
        pairs = [
            (f, s)
            for f, s in zip(first, seconds, strict=True)
            if f is not None and s is not None and f.requires_grad
        ]
        with torch.enable_grad():
            again = torch.autograd.grad(
                [f for f, _ in pairs], [grad, *inputs], [s for _, s in pairs], allow_unused=True
            )
        return None, *again


def _fresh(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def _gradients(run: Run, grad: Tensor, inputs: Sequence[Tensor], *, create_graph: bool) -> Grads:
    with torch.enable_grad():
        return torch.autograd.grad(
            run(*inputs), inputs, grad, create_graph=create_graph, allow_unused=True
        )


class _Inside(nn.Module):
    """A block by its own forward, whatever replaces it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self._run = block, block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


@contextmanager
def recomputed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Let blocks keep nothing of their inside, while a `with` body lasts."""
    for block in blocks:
        block.forward = _Recomputing(block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


class _Recomputing:
    def __init__(self, block: nn.Module) -> None:
        self._inside = _Inside(block)
        self._names = [f"block.{name}" for name, _ in block.named_parameters()]
        self._parameters = [parameter for _, parameter in block.named_parameters()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args or not torch.is_grad_enabled() or _leads_on((args[1:], kwargs)):
            return self._inside(*args, **kwargs)
        return self._keeping_nothing(*args, **kwargs)

    def _keeping_nothing(self, hidden_BTD: Tensor, *args: Any, **kwargs: Any) -> Any:
        form: list[Any] = []

        def run(hidden_BTD: Tensor, *parameters: Tensor) -> Tensor:
            named = dict(zip(self._names, parameters, strict=True))
            out = torch.func.functional_call(
                self._inside, named, (hidden_BTD, *args), kwargs, tie_weights=False
            )
            form[:] = out[1:] if isinstance(out, tuple) else [None]
            form.insert(0, isinstance(out, tuple))
            first: Tensor = out[0] if isinstance(out, tuple) else out
            return first

        out_BTD: Tensor = _Forward.apply(run, hidden_BTD, *self._parameters)
        return (out_BTD, *form[1:]) if form[0] else out_BTD


def _leads_on(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(map(_leads_on, value.values()))
    return isinstance(value, tuple | list) and any(map(_leads_on, value))
