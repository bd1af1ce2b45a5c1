"""The machine of an audit: its device, its libraries, and the memory the audit used."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path
from typing import Any

import psutil

from qaudit.core.registry import schemes
from qaudit.errors import MachineError
from qaudit.planning.pin import libraries
from qaudit.support.lazy import torch


def open_device(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Return a planned device and dtype as torch has them; a GPU must be there.

    `cuda` is the device with most free memory.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError(
            "this torch sees no CUDA device", hint="use `--device cpu`, or install a CUDA build"
        )
    if device == "mps" and not torch.backends.mps.is_available():
        raise MachineError("this torch sees no MPS device", hint="use `--device cpu`")
    opened = torch.device(device)
    if opened.type == "cuda":
        opened = torch.device("cuda", _ordinal(opened))
    return opened, getattr(torch, dtype)


def _ordinal(device: torch.device) -> int:
    count = torch.cuda.device_count()
    if device.index is None:  # the one that this process uses already, else the one most free

        def rank(k: int) -> tuple[bool, int]:
            return torch.cuda.memory_reserved(k) > 0, torch.cuda.mem_get_info(k)[0]

        return max(range(count), key=rank)
    if device.index >= count:
        raise MachineError(
            f"there is no `{device}`: this torch sees {count} CUDA devices",
            hint=f"use `--device cuda`, or a number up to {count - 1}",
        )
    return device.index


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_nbytes": psutil.virtual_memory().total,
        "libraries": libraries(schemes().built_in.values()),
    }


def resident_nbytes() -> int:
    return int(psutil.Process().memory_info().rss)


def peak_nbytes(device: torch.device) -> int:
    """Return the most memory this process ever held, on the GPU if it computes there."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
