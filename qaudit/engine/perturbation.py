"""A change as small as the arithmetic makes: what rounding in one block is worth.

What GPTQ and AWQ store depends on which way a sum was rounded, and another device, library or
number of threads rounds otherwise, in every block. A perturbed pass stands for them. Batches are
others, and two things move up or down by a fixed pattern:

- every hidden state that enters a block, by 4 units in the last place of float32, or 1 of a half
  type. On the demo, rounding in one block made 1.8 to 2.7 and 0.43 to 0.52 of the norm, float64
  being the reference.
- every entry of the Gram matrices of calibration inputs, by 4 units in the last place of what it
  is at most, sqrt(h_ii h_jj): the backward error of a float32 sum and of a Cholesky factorization
  (Higham, Accuracy and Stability of Numerical Algorithms, chapters 3 and 10).

By one unit, a code turned over in one of four measurements on the demo, and the losses of the
others moved by 1e-8: a single subject did not show what can happen.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qaudit.core.linears import Inputs

_UNITS = {2: 1, 4: 4, 8: 4}  # by bytes of a value
_EPSILON = 2.0**-23  # of float32, in which Gram matrices are summed
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def perturbed(values: Tensor, pattern: int) -> Tensor:
    """Return values some units in the last place away; zeros and what is not finite stay.

    Blocks have patterns of their own: errors by one that repeats would add up.
    """
    steps = _UNITS[values.element_size()] * _signs(values.shape, pattern)
    bits = values.view(_BITS[values.element_size()])
    moved = (bits + steps.to(bits)).view(values.dtype)
    return torch.where(torch.isfinite(values) & (values != 0), moved, values)


def perturbed_inputs(inputs: Inputs, pattern: int) -> Inputs:
    """Return inputs with another Gram matrix, symmetric as well, and a drift as much changed."""
    gram_CC = inputs.gram_CC
    scale_C = _UNITS[4] ** 0.5 * gram_CC.diagonal().sqrt()
    steps_CC = torch.triu(_signs(gram_CC.shape, pattern)).to(gram_CC)
    steps_CC += torch.triu(steps_CC, 1).T
    change_CC = _EPSILON * steps_CC * scale_C * scale_C[:, None]
    drift_CC = None if inputs.drift_CC is None else inputs.drift_CC + change_CC
    return replace(inputs, gram_CC=gram_CC + change_CC, drift_CC=drift_CC)


def _signs(shape: torch.Size, pattern: int) -> Tensor:
    """Return -1 and 1 by a fixed pattern, made on the host: it is the same on every device."""
    generator = torch.Generator().manual_seed(pattern)
    return 2 * torch.randint(0, 2, shape, generator=generator) - 1
