"""A GPU as the engine uses it: what is free there, and how a tensor of the host gets there."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qaudit.host import available_nbytes
from qaudit.model.routes import Weights


def free_nbytes(device: torch.device) -> int:
    """Return the memory of a GPU that is free, or freed here and cached by torch."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; from pinned memory the host need not wait for the copy.

    Torch keeps pinned memory until the copy is over, and then uses it again.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def fits_whole(weights: Weights, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a whole model, and as much again for loading it, fits in free memory."""
    count = sum(math.prod(weights.shape(name)) for name in weights.names())
    needed = 2 * count * dtype.itemsize  # the library reads before it casts
    if device.type == "cuda" and needed > free_nbytes(device):
        return False
    return needed < available_nbytes()
