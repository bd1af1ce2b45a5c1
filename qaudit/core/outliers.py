"""Columns in two precisions: those with outliers keep more bits than the others.

GPTQ walks the columns and moves each error on to those behind it. With the columns that keep more
bits at the end, they take up what the others lost. Eliminating them first comes to the same: with
K the kept columns and I the others, the others are rounded for the Gram matrix

    S = H_II - H_IK H_KK^-1 H_KI

which is what is left of an error once the kept columns have made up for it, and then

    W_K + (W_I - Q_I) H_IK H_KK^-1

is what they become. That is the published loop in exact arithmetic. H is damped before it is split,
so that the others are damped by the same number as the kept columns.

Shapes: R rows, C columns, K kept columns, I others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from qaudit.core.linears import (
    INDEX_BITS,
    Inputs,
    Linears,
    Quantized,
    StoredWeight,
    required_inputs,
)
from qaudit.support.lazy import Tensor, torch

LARGEST_SHARE = 16  # at most one column in so many is kept, as 256 of 4,096 are
DAMPED = 1e-12  # what GPTQ adds to a diagonal that is damped already


@dataclass(frozen=True, eq=False)
class PlainColumns(StoredWeight):
    """Columns as they are, in 16 bits."""

    weight_RC: Tensor

    @classmethod
    def of(cls, weight_RC: Tensor) -> PlainColumns:
        return cls(weight_RC.to(torch.bfloat16))

    def decode(self) -> Tensor:
        return self.weight_RC.float()

    @property
    def nbits(self) -> int:
        return 16 * self.weight_RC.numel()


@dataclass(frozen=True, eq=False)
class MixedCodes(StoredWeight):
    """Most columns in few bits, the others in more, and which column is where."""

    rest: StoredWeight
    kept: StoredWeight | None  # None: no column
    order_C: Tensor  # the columns of `rest`, then those of `kept`, by their place in the weight
    indices: int  # of columns, which a file has to hold

    def decode(self) -> Tensor:
        parts = [part.decode() for part in (self.rest, self.kept) if part is not None]
        return torch.cat(parts, 1)[:, torch.argsort(self.order_C)]

    @property
    def nbits(self) -> int:
        kept = 0 if self.kept is None else self.kept.nbits
        return self.rest.nbits + kept + INDEX_BITS * self.indices


@dataclass(frozen=True, eq=False)
class Split:
    """Which columns are rounded to few bits, in which order, and which are kept."""

    rest_I: Tensor
    kept_K: Tensor
    notes: tuple[str, ...] = ()

    @classmethod
    def by(cls, size_C: Tensor, count: int) -> Split:
        """Keep the columns of the largest sizes; the others are in rising order."""
        order_C = torch.argsort(size_C, stable=True)
        most = len(order_C) // LARGEST_SHARE
        notes: tuple[str, ...] = ()
        if count > most:
            notes = (f"{most} of {len(order_C)} columns keep more bits, not {count}",)
            count = most
        rest = len(order_C) - count
        return cls(order_C[:rest], order_C[rest:], notes)

    def around(
        self, x: Tensor, rest: Callable[[Tensor], Tensor], kept: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Change the last dimension of x in both parts, each in its own way."""
        out = x.clone()
        out[..., self.rest_I] = rest(x[..., self.rest_I])
        if len(self.kept_K):
            out[..., self.kept_K] = kept(x[..., self.kept_K])
        return out


def round_mixed(
    linears: Linears,
    split: Split,
    rounding: Callable[[Linears], Quantized],
    keep: Callable[[Tensor], StoredWeight],
    *,
    damp: float,
    indices: int,
) -> tuple[Mapping[str, StoredWeight], tuple[str, ...]]:
    """Round most columns, and keep the others.

    `rounding` sees a Gram matrix that is damped already, and adds no more than `DAMPED`.
    """
    inputs = required_inputs(linears, "outliers")
    first = next(iter(linears.weights.values()))
    wide = torch.promote_types(first.dtype, torch.float32)
    gram_CC = inputs.gram_CC.to(first.device, wide, copy=True)
    alive_C = gram_CC.diagonal() > 0  # GPTQ zeroes the weights of the others
    damping = damp * gram_CC.diagonal().sum() / alive_C.sum().clamp(min=1)
    gram_CC.diagonal().add_(damping * alive_C)
    rest_I, kept_K = split.rest_I.to(first.device), split.kept_K.to(first.device)
    gram_II = gram_CC[rest_I][:, rest_I]
    solved_KI = gram_CC[kept_K][:, rest_I]
    if len(kept_K):
        gram_KK = gram_CC[kept_K][:, kept_K]
        gram_KK.diagonal().clamp_(min=torch.finfo(wide).tiny)
        solved_KI = torch.linalg.solve(gram_KK, solved_KI)
        gram_II = gram_II - gram_CC[rest_I][:, kept_K] @ solved_KI
        gram_II = (gram_II + gram_II.T) / 2
    weights = {
        name: weight.detach().to(wide)[:, rest_I] for name, weight in linears.weights.items()
    }
    alone = Inputs(gram_II, inputs.absmean_C[rest_I], inputs.tokens)
    rounded = rounding(replace(linears, weights=weights, inputs=alone, fold_C=None))
    order_C = torch.cat([rest_I, kept_K])
    stored = {}
    for name, weight in linears.weights.items():
        kept = None
        if len(kept_K):
            error_RI = weights[name] - rounded.stored[name].decode().to(wide)
            kept = keep(weight.detach().to(wide)[:, kept_K] + error_RI @ solved_KI.T)
        stored[name] = MixedCodes(rounded.stored[name], kept, order_C, indices)
    return stored, (*split.notes, *rounded.notes)
