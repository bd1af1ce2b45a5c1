"""A change as small as the arithmetic can make: one unit in the last place.

What GPTQ and AWQ store depends on which way a sum was rounded, and another device, library or
number of threads rounds otherwise. A perturbed pass stands for them: every embedded value is moved
to a neighbouring number, up or down by a fixed pattern, and the batches are others.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SEED = 0
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def one_unit_away(values: Tensor) -> Tensor:
    """Return each value's neighbour, farther from zero or nearer; zeros and infinities stay."""
    generator = torch.Generator().manual_seed(_SEED)
    steps = 2 * torch.randint(0, 2, values.shape, generator=generator) - 1
    bits = values.view(_BITS[values.element_size()])
    moved = (bits + steps.to(bits)).view(values.dtype)
    return torch.where(torch.isfinite(values) & (values != 0), moved, values)
