"""A GPU as the engine uses it: what is free there, and how a tensor of the host gets there.

Copies between the host and a GPU, on streams of their own beside the one that computes.

A copy to the GPU starts when what it reads is written, and what computes next waits for it on the
GPU; a copy to the host starts when what it reads is computed, and the host waits only where it
reads it. Torch keeps memory on both sides until the copies that were entered are over: pinned
memory by itself, a GPU's where it is told which other stream uses it. As the host only enters
work, it would soon have entered a whole pass, and each copy that is under way takes memory: it
waits for all but the latest few. Elsewhere than on a GPU, copies are plain.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass

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


_UNDER_WAY = 4  # two batches that come and two that go: one is computed, the next is on its way


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A tensor of the host, and when a GPU has written it."""

    tensor: Tensor
    written: torch.cuda.Event | None = None

    def read(self) -> Tensor:
        """Return the tensor once it is written."""
        if self.written is not None:
            self.written.synchronize()
        return self.tensor


class Copies:
    """Copies between the host and one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        self._up = torch.cuda.Stream(device) if is_gpu else None
        self._down = torch.cuda.Stream(device) if is_gpu else None
        self._under_way: deque[torch.cuda.Event] = deque()

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Return a copy on the host, which is pinned if it comes from a GPU."""
        if self._down is None or tensor.device.type == "cpu":
            return HostCopy(tensor.cpu())
        self._down.wait_event(self._computing.record_event())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._down):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._down)
        written = self._down.record_event()
        self._wait_for_the_oldest(written)
        return HostCopy(host, written)

    def to_device(self, copy: HostCopy) -> Tensor:
        """Return a copy on the device, for the stream that computes."""
        if self._up is None:
            return copy.tensor.to(self._device, non_blocking=True)
        self._wait_for_the_oldest(self._computing.record_event())
        if copy.written is not None:
            self._up.wait_event(copy.written)
        with torch.cuda.stream(self._up):
            placed = upload(copy.tensor, self._device)
        self.arrive(self._up.record_event())
        placed.record_stream(self._computing)
        return placed

    def ahead(self) -> AbstractContextManager[None]:
        """Copy to the device beside what it computes, in a `with` body; see `sent`."""
        return torch.cuda.stream(self._up)  # does nothing where there is no stream

    def sent(self) -> torch.cuda.Event | None:
        """Return when what was copied to the device so far is there."""
        return None if self._up is None else self._up.record_event()

    def arrive(self, sent: torch.cuda.Event | None) -> None:
        """Let what computes from now on wait for what was sent."""
        if sent is not None:
            self._computing.wait_event(sent)

    def give_up(self) -> None:
        """Let what is copied `ahead` from now on wait until its memory is no longer computed on."""
        if self._up is not None:
            self._up.wait_event(self._computing.record_event())

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _wait_for_the_oldest(self, entered: torch.cuda.Event) -> None:
        self._under_way.append(entered)
        if len(self._under_way) > _UNDER_WAY:
            self._under_way.popleft().synchronize()
