"""The Hessian of a model's mean token loss over given documents, as products with vectors.

H v is the gradient of the slope of the loss along v: two backward passes (Pearlmutter 1994),
exact to rounding, for every parameter of the model at once, tied ones counted once. Documents
follow one another, a few windows at a time, and their products are added up; with each come
v.H_d v of the summed loss of every document and v.(Hv) of every parameter tensor.

Attention is the plain formula: the fused kernels have no second derivative. Blocks keep nothing
of their inside (`recomputed.py`), so that beside the weights there are three vectors as long as
them: v, the first gradient, and the sum; the second gradient comes as the first one goes. That
is what a training step with Adam holds.

Shapes: B windows, T tokens, P parameters, D documents, S parameter tensors.

A block whose inside is computed again whenever it is differentiated: once, or twice.

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

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qaudit.core.spectrum import Applied, dot
from qaudit.engine.batches import make_batches
from qaudit.errors import SourceError
from qaudit.model.proven import NO_LIMIT
from qaudit.types import Window

Grads = tuple[Tensor | None, ...]

HessianPart = tuple[int, Tensor, Tensor]
"""A document, some of its windows side by side (B, T), and which of their tokens are scored."""


def cut(
    documents: Sequence[Sequence[Window]], context: int, positions: int, limit: int = NO_LIMIT
) -> list[HessianPart]:
    """Put the windows of each document side by side, as many as fit in so many positions."""
    return [
        (document, batch.tokens_BT, batch.scored_BT())
        for document, windows in enumerate(documents)
        for batch in make_batches(windows, context, positions, limit)
    ]


class LossHessian:
    """Multiplies vectors with the Hessian of a model's mean token loss."""

    def __init__(
        self, model: Any, blocks: Sequence[nn.Module], parts: Sequence[HessianPart]
    ) -> None:
        """Take a whole model; its parameters are differentiated and not changed."""
        self._model, self._blocks, self._parts = model, blocks, parts
        named: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.names, self._parameters = list(named), list(named.values())
        for parameter in self._parameters:
            parameter.requires_grad_()
        self.sizes = [parameter.numel() for parameter in self._parameters]
        self.tokens_D = np.zeros(1 + max(document for document, _, _ in parts), dtype=np.int64)
        for document, _, scored_BT in parts:
            self.tokens_D[document] += int(scored_BT.sum())

    @property
    def like(self) -> Tensor:
        """Return a tensor of the device and dtype that vectors have."""
        return self._parameters[0].detach()

    def loss(self) -> float:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            total = sum(float(self._nll(*windows)) for _, *windows in self._parts)
        return total / float(self.tokens_D.sum())

    def multiply(self, vector_P: Tensor) -> Tensor:
        return self(vector_P).product_P

    def __call__(self, vector_P: Tensor) -> Applied:
        """Return the product, the forms of the documents' summed losses, and of the tensors."""
        product_P = torch.zeros_like(vector_P)
        along, sums = vector_P.split(self.sizes), product_P.split(self.sizes)
        form_D = np.zeros(len(self.tokens_D))
        with recomputed(self._blocks), sdpa_kernel(SDPBackend.MATH):
            for document, *windows in self._parts:
                seconds = self._curve(windows, along)
                for second, direction, summed in zip(seconds, along, sums, strict=True):
                    if second is not None:
                        form_D[document] += dot(direction, second.flatten())
                        summed.add_(second.flatten())
        product_P /= int(self.tokens_D.sum())
        form_S = [dot(direction, summed) for direction, summed in zip(along, sums, strict=True)]
        if not np.isfinite(form_D).all():
            raise SourceError(
                "the second derivatives of its loss are not finite",
                hint="the checkpoint is damaged or its training diverged; try another revision",
            )
        return Applied(product_P, np.concatenate([form_D, form_S]))

    def _curve(self, windows: Sequence[Tensor], along: Sequence[Tensor]) -> Grads:
        with torch.enable_grad():
            gradients: Grads = torch.autograd.grad(
                self._nll(*windows), self._parameters, create_graph=True, allow_unused=True
            )
            slopes = [
                (gradient.flatten() * direction).sum()
                for gradient, direction in zip(gradients, along, strict=True)
                if gradient is not None  # of a parameter that the loss does not use
            ]
            del gradients  # as large as the model, and the graph does not need them
            slope = torch.stack(slopes).sum()
            return torch.autograd.grad(slope, self._parameters, allow_unused=True)

    def _nll(self, tokens_BT: Tensor, scored_BT: Tensor) -> Tensor:
        tokens_BT, scored_BT = tokens_BT.to(self.like.device), scored_BT.to(self.like.device)
        logits_BTV = self._model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]
        wanted_BT = scored_BT[:, 1:]
        return nn.functional.cross_entropy(
            logits_BTV[wanted_BT], tokens_BT[:, 1:][wanted_BT], reduction="sum"
        )


Run = Callable[..., Tensor]
"""Hidden states and parameters -> hidden states; nothing else of it is differentiated."""


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
        block.forward = _recomputing(block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _recomputing(block: nn.Module) -> Callable[..., Any]:
    inside = _Inside(block)
    names = [f"block.{name}" for name, _ in block.named_parameters()]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not args or not torch.is_grad_enabled() or _leads_on((args[1:], kwargs)):
            return inside(*args, **kwargs)
        beside: list[tuple[Any, ...] | None] = []  # what a block returns besides hidden states

        def run(hidden_BTD: Tensor, *parameters: Tensor) -> Tensor:
            named = dict(zip(names, parameters, strict=True))
            out = torch.func.functional_call(
                inside, named, (hidden_BTD, *args[1:]), kwargs, tie_weights=False
            )
            beside[:] = [out[1:] if isinstance(out, tuple) else None]
            first: Tensor = out[0] if isinstance(out, tuple) else out
            return first

        out_BTD: Tensor = _Forward.apply(run, args[0], *block.parameters())
        return out_BTD if beside[0] is None else (out_BTD, *beside[0])

    return forward


def _leads_on(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(map(_leads_on, value.values()))
    return isinstance(value, tuple | list) and any(map(_leads_on, value))
