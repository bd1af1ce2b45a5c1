"""A rotation in front of a linear, x R (W R)^T, which changes nothing but what is rounded.

R is orthogonal and symmetric, and closed-form for every n = 2^k m with m odd: a Walsh-Hadamard
matrix of 2^k beside a Hartley matrix of m, cas(2 pi i j / m) / sqrt(m). Its entries are at most
sqrt(2 / n) in magnitude, so that no column of what is rotated stands out. QuaRot's tables of
Hadamard matrices of 12, 20, ... 172 are not needed.

Every linear is rotated alone, which is exact for every architecture: nothing has to be folded into
what precedes. What is rounded is the same as with QuaRot's rotations, some of which are folded:

- R1, of the residual: a linear behind a pre-norm reads (x / g) R, g the norm's weight, and its
  weight is W diag(g) R, online as folded. What writes to the residual is rounded as R^T W, and
  turned back in the dense weight. Embedding and head are not rounded: rotating them, which needs
  an embedding that is not the head, changes no number.
- R2, of values: v is rounded as R^T W in each head. What o reads is rotated over all heads at once,
  as by R2 and the Hadamard matrix across heads, where both sizes are powers of two.
- R3, of queries and keys: `qaudit/core/activations.py`. R4, of what down reads: online there, too.

Norms behind sublayers (OLMo 2) have no R1 that is free: readers are rotated online, what writes is
not. A block says what can be rotated of its outputs (`qaudit/model/folds.py`).

Shapes: R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from qaudit.core.linears import Inputs, Linears, Rows
from qaudit.support.lazy import Tensor, torch


def rotation(n: int) -> Tensor:
    power = n & -n  # the largest power of two that divides n
    odd = n // power
    walsh = torch.ones(1, 1, dtype=torch.float64)
    while len(walsh) < power:
        walsh = torch.cat([torch.cat([walsh, walsh], 1), torch.cat([walsh, -walsh], 1)])
    k = torch.arange(odd, dtype=torch.float64)
    angle = 2 * math.pi * (torch.outer(k, k) % odd) / odd
    return torch.kron(walsh / math.sqrt(power), (angle.cos() + angle.sin()) / math.sqrt(odd))


def rotate(x: Tensor) -> Tensor:
    """Return x @ rotation(n), computed in at least float32 as two small products.

    A rotation of a * b is that of a beside that of b: a + b multiplications a column, not a * b.
    """
    n = x.shape[-1]
    a = 1 << ((n & -n).bit_length() - 1) // 2  # a power of two near the root of the largest
    wide = torch.promote_types(x.dtype, torch.float32)
    left, right = _factors(a, n // a, wide, x.device)
    turned = left @ (x.to(wide).reshape(-1, a, n // a) @ right)
    return turned.reshape(x.shape).to(x.dtype)


@lru_cache(maxsize=16)
def _factors(a: int, b: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return rotation(a).to(device, dtype), rotation(b).to(device, dtype)


def rotate_rows(weight_RC: Tensor, rows: Rows) -> Tensor:
    """Return a weight with some of its rows rotated; done twice it is the weight again."""
    turned_RC = weight_RC.clone()
    part_CR = weight_RC[rows.start : rows.stop].T
    turned_CR = rotate(part_CR.reshape(-1, rows.width)).reshape(part_CR.shape)
    turned_RC[rows.start : rows.stop] = turned_CR.T
    return turned_RC


@dataclass(frozen=True, eq=False)
class Rotated:
    """Linears behind the rotation, and what they read and write in the model.

    A norm's weight is moved into the linears behind it, so that what is rotated is the norm's
    output without it. Outputs that a block lets one rotate for nothing are rotated, too.
    """

    linears: Linears
    norm_C: Tensor | None
    rows: Mapping[str, Rows]

    def inputs(self, x: Tensor) -> Tensor:
        """Return the inputs of the rotated weights in place of x, in at least float32."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return rotate(wide if self.norm_C is None else wide / self.norm_C.to(wide.dtype))

    def outwards(self, name: str, weight_RC: Tensor) -> Tensor:
        """Rotate the rows of a weight back: what it adds is then in the model's own basis."""
        return rotate_rows(weight_RC, self.rows[name]) if name in self.rows else weight_RC


def rotated(linears: Linears) -> Linears:
    """Return linears and the second moments of their inputs behind a rotation in front of them."""
    return fused(replace(linears, norm_C=None, rows=None)).linears


def fused(linears: Linears) -> Rotated:
    """Return linears as QuaRot's rotations make them: norms moved in, outputs rotated."""
    norm_C = linears.norm_C
    if norm_C is not None:
        norm_C = torch.where(norm_C == 0, 1.0, norm_C.float())  # weights there multiply zeros
    rows = {name: axis for name, axis in (linears.rows or {}).items() if name in linears.weights}
    weights = {}
    for name, wide_RC in linears.widened():
        if norm_C is not None:
            wide_RC = wide_RC * norm_C
        wide_RC = rotate_rows(wide_RC, rows[name]) if name in rows else wide_RC
        weights[name] = rotate(wide_RC)
    inputs = linears.inputs
    if inputs is not None:
        gram_CC = inputs.gram_CC
        if norm_C is not None:
            gram_CC = gram_CC / norm_C / norm_C[:, None]
        # What is no sum of squares is not known behind the rotation.
        gram_CC = rotate(rotate(gram_CC).T.contiguous()).contiguous()
        inputs = Inputs((gram_CC + gram_CC.T) / 2, inputs.absmean_C, inputs.tokens)
    alone = replace(linears, weights=weights, inputs=inputs, fold_C=None, fold_is_norm=False)
    return Rotated(alone, norm_C, rows)
