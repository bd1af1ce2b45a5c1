"""Which device and dtype an audit computes with. Torch is imported only where there is a GPU.

They are chosen by a rule that gives the same answer every time: float32 on a CPU; bf16 on a GPU
that supports it, float32 on others. The plan prints the answer and the run keeps to it. Both change
numbers, so nothing is decided by what is faster; `qaudit doctor` measures that. The ordinal of a
GPU changes none: where several are there, a run takes the one with most free memory.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from qaudit.core.column_loops import PLAIN, choose
from qaudit.errors import UsageError
from qaudit.support.lazy import torch

if TYPE_CHECKING:
    from qaudit.core.scheme import Scheme
    from qaudit.planning.sizes import Sizes

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_NODES = ("/dev/nvidiactl", "/dev/dxg")  # of the driver on Linux, and in WSL2
_NO_MPS = "MPS has no float64, in which divergences and moments are summed"


def choose_device(device: str, dtype: str) -> tuple[str, str]:
    if device.partition(":")[0] not in DEVICES:
        raise UsageError(f"there is no device `{device}`", hint=f"one of {', '.join(DEVICES)}")
    if dtype not in DTYPES:
        raise UsageError(f"there is no dtype `{dtype}`", hint=f"one of {', '.join(DTYPES)}")
    if device == "auto":
        device = why_auto()[0]
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") and _supports_bf16() else "float32"
    return device, dtype


def choose_audited(device: str, dtype: str) -> tuple[str, str]:
    """Return the device and dtype of an audit; refuse a device that cannot run one."""
    if device == "mps":
        raise UsageError(f"an audit cannot run on `mps`: {_NO_MPS}", hint="use `--device cpu`")
    return choose_device(device, dtype)


def why_auto() -> tuple[str, str]:
    build = _torch_build()
    if build.startswith("rocm"):
        return "cpu", "ROCm is not tested, and is used only where `--device cuda` asks for it"
    if build.startswith("xpu"):
        return "cpu", "XPU is not supported"
    if sys.platform == "darwin":
        is_apple = platform.machine() == "arm64"
        return "cpu", _NO_MPS if is_apple else "there is no CUDA device"
    if not _has_driver():
        return "cpu", f"no CUDA driver: there is neither {' nor '.join(_NODES)}"
    if torch.cuda.is_available():
        return "cuda", "this torch sees a CUDA device"
    return "cpu", "there is a CUDA driver, and this torch sees no device"


def device_notes(device: str) -> tuple[str, ...]:
    """Return why `auto` leaves an accelerator unused, where there is one."""
    if device != "auto":
        return ()
    chosen, reason = why_auto()
    is_unused = chosen == "cpu" and not reason.startswith(("no CUDA", "there is no"))
    return (f"computed on the CPU: {reason}",) if is_unused else ()


def choose_column_loop(device: str, schemes: Sequence[Scheme], sizes: Sizes) -> tuple[str, str]:
    """Return how GPTQ's columns are rounded, and a note; on a GPU what is proven there."""
    if not device.startswith("cuda") or not any(scheme.rounds_columns for scheme in schemes):
        return PLAIN, ""
    if not torch.cuda.is_available():
        return (
            PLAIN,
            "GPTQ's columns are rounded by the plain loop: the plan was made without a GPU",
        )
    widths = {columns for _, columns in sizes.matrices.values()} or {sizes.hidden, sizes.widest}
    return choose(widths, torch.device(device))


@cache
def gpu_name() -> str | None:
    if not _has_driver():
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _torch_build() -> str:
    """Return the suffix of the version of torch: cu128, rocm6.4, xpu, cpu or nothing."""
    try:
        return version("torch").partition("+")[2]
    except PackageNotFoundError:
        return ""


def _has_driver() -> bool:
    return any(Path(node).exists() for node in _NODES)


def _supports_bf16() -> bool:
    """Return whether the GPU has bf16 units; a plan for a GPU of another machine assumes so."""
    if not _has_driver():
        return True
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
