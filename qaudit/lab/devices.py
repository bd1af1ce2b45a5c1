"""What a run computes on, and that it computes the same there each time.

A CPU does for one number of threads and one torch. A GPU is told to, and flash attention with it:
the other fast kernel of attention adds up in whatever order its blocks come.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from qaudit.errors import MachineError, UsageError

DEVICES = ("auto", "cpu", "cuda", "mps")


def use_threads(count: int) -> None:
    """Compute with so many threads on a CPU."""
    torch.set_num_threads(count)


def choose_device(name: str) -> torch.device:
    """Return the device to train on; one that was asked for must be there."""
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise UsageError(f"there is no device `{name}`", hint=f"one of {', '.join(DEVICES)}")
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if kind == "auto":
        return torch.device("cuda" if there["cuda"] else "cpu")
    if not there.get(kind, True):
        raise MachineError(f"this torch sees no {kind} device", hint="use `--device cpu`")
    return torch.device(name)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Let a GPU compute the same bits each time; CPUs do so anyhow, for a number of threads."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def environment(device: torch.device, *, compiled: bool) -> dict[str, Any]:
    """Say what the weights were computed by."""
    return {
        "torch": torch.__version__,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
    }
