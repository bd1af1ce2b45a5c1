"""What this machine is, what of it an audit uses, and what it used in the end.

Device and dtype are a policy, not a guess: bf16 on a GPU; float32 on a CPU, except where the
CPU has a matrix unit for bf16 (AMX) and a measurement of a fraction of a second says that it
is faster. Both stand in the audit, because both change numbers.
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from qaudit.errors import MachineError, UsageError

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "bitsandbytes",
    "safetensors",
    "numpy",
    "scipy",
)


def foresee(device: str, dtype: str) -> tuple[str, str]:
    """Return the device and dtype an audit would use, without importing torch."""
    _check(device, dtype)
    if device == "auto":
        device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return device, dtype


def choose(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype to use; a device that was asked for must be there."""
    import torch

    _check(device, dtype)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError(
            "this torch sees no CUDA device", hint="use `--device cpu`, or install a CUDA build"
        )
    if device == "mps" and not torch.backends.mps.is_available():
        raise MachineError("this torch sees no MPS device", hint="use `--device cpu`")
    chosen = torch.device(device)
    if dtype != "auto":
        return chosen, getattr(torch, dtype)
    if chosen.type == "cuda" or (chosen.type == "cpu" and _bf16_is_faster()):
        return chosen, torch.bfloat16
    return chosen, torch.float32


def _check(device: str, dtype: str) -> None:
    if device.partition(":")[0] not in DEVICES:
        raise UsageError(f"there is no device `{device}`", hint=f"one of {', '.join(DEVICES)}")
    if dtype not in DTYPES:
        raise UsageError(f"there is no dtype `{dtype}`", hint=f"one of {', '.join(DTYPES)}")


def _bf16_is_faster() -> bool:
    """Measure, but only where the CPU has a matrix unit for bf16."""
    import torch

    if not torch.cpu._is_amx_tile_supported():
        return False

    def seconds(dtype: torch.dtype) -> float:
        a = torch.ones(1024, 1024, dtype=dtype)
        best = float("inf")
        for _ in range(4):  # the first warms up
            began = time.perf_counter()
            a @ a
            best = min(best, time.perf_counter() - began)
        return best

    return seconds(torch.bfloat16) < 0.67 * seconds(torch.float32)


def libraries() -> dict[str, str]:
    """Return the versions of everything that computes."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def environment(device: torch.device) -> dict[str, Any]:
    """Describe the machine and the libraries."""
    import torch

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_nbytes": psutil.virtual_memory().total,
        "libraries": libraries(),
    }


def resident_nbytes() -> int:
    """Return the memory this process holds now."""
    return int(psutil.Process().memory_info().rss)


def peak_nbytes(device: torch.device) -> int:
    """Return the most memory this process ever held, on the GPU if it computes there."""
    if device.type == "cuda":
        import torch

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
