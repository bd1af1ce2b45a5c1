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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qaudit.diagnostics.curvature.measure.recomputed import recomputed
from qaudit.diagnostics.curvature.spectrum import Applied, dot
from qaudit.engine.batches import make_batches
from qaudit.errors import SourceError
from qaudit.model.proven import NO_LIMIT
from qaudit.types import Window


@dataclass(frozen=True, eq=False)
class HessianPart:
    """Windows of one document, side by side, and which of their tokens are scored."""

    document: int
    tokens_BT: Tensor
    scored_BT: Tensor


def cut(
    documents: Sequence[Sequence[Window]], context: int, positions: int, limit: int = NO_LIMIT
) -> list[HessianPart]:
    """Put the windows of each document side by side, as many as fit in so many positions."""
    return [
        HessianPart(document, batch.tokens_BT, batch.scored_BT())
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
        self._named = dict(model.named_parameters())
        for parameter in self._named.values():
            parameter.requires_grad_()
        self._sizes = [parameter.numel() for parameter in self._named.values()]
        documents = 1 + max(part.document for part in parts)
        self.tokens_D = np.zeros(documents, dtype=np.int64)
        for part in parts:
            self.tokens_D[part.document] += int(part.scored_BT.sum())

    @property
    def names(self) -> list[str]:
        return list(self._named)

    @property
    def sizes(self) -> list[int]:
        return self._sizes

    @property
    def like(self) -> Tensor:
        """Return a tensor of the device and dtype that vectors have."""
        first: Tensor = next(iter(self._named.values()))
        return first.detach()

    def loss(self) -> float:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            total = sum(float(self._nll(part)) for part in self._parts)
        return total / float(self.tokens_D.sum())

    def multiply(self, vector_P: Tensor) -> Tensor:
        return self(vector_P).product_P

    def __call__(self, vector_P: Tensor) -> Applied:
        """Return the product, the forms of the documents' summed losses, and of the tensors."""
        product_P = torch.zeros_like(vector_P)
        along, sums = vector_P.split(self._sizes), product_P.split(self._sizes)
        form_D = np.zeros(len(self.tokens_D))
        with recomputed(self._blocks), sdpa_kernel(SDPBackend.MATH):
            for part in self._parts:
                for second, there, summed in zip(
                    self._curve(part, along), along, sums, strict=True
                ):
                    if second is not None:
                        form_D[part.document] += dot(there, second.flatten())
                        summed.add_(second.flatten())
        product_P /= int(self.tokens_D.sum())
        form_S = [dot(there, summed) for there, summed in zip(along, sums, strict=True)]
        if not np.isfinite(form_D).all():
            raise SourceError(
                "the second derivatives of its loss are not finite",
                hint="the checkpoint is damaged or its training diverged; try another revision",
            )
        return Applied(product_P, np.concatenate([form_D, form_S]))

    def _curve(self, part: HessianPart, along: Sequence[Tensor]) -> Sequence[Tensor | None]:
        parameters = list(self._named.values())
        with torch.enable_grad():
            # The graph does not need the first gradients, which are as large as the model.
            slope = _slope(
                torch.autograd.grad(
                    self._nll(part), parameters, create_graph=True, allow_unused=True
                ),
                along,
            )
            return torch.autograd.grad(slope, parameters, allow_unused=True)

    def _nll(self, part: HessianPart) -> Tensor:
        device = self.like.device
        tokens_BT, scored_BT = part.tokens_BT.to(device), part.scored_BT.to(device)
        logits_BTV = self._model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]
        wanted_BT = scored_BT[:, 1:]
        return nn.functional.cross_entropy(
            logits_BTV[wanted_BT], tokens_BT[:, 1:][wanted_BT], reduction="sum"
        )


def _slope(gradients: Sequence[Tensor | None], along: Sequence[Tensor]) -> Tensor:
    """Return the inner product; a parameter that the loss does not use has no gradient."""
    parts = [
        (gradient.flatten() * there).sum()
        for gradient, there in zip(gradients, along, strict=True)
        if gradient is not None
    ]
    return torch.stack(parts).sum()
