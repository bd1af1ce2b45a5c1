"""Which device and dtype an audit uses: a rule that gives the same answer every time.

float32 on a CPU; bf16 on a GPU that supports it, float32 on others. The plan prints the answer
and the run keeps to it. Both change numbers, so nothing is decided by what is faster; `qaudit
doctor` measures that.
"""

from __future__ import annotations

from pathlib import Path

from qaudit.errors import UsageError

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def choose_device(device: str, dtype: str) -> tuple[str, str]:
    """Return the device and dtype of an audit; torch is imported only where there is a GPU."""
    if device.partition(":")[0] not in DEVICES:
        raise UsageError(f"there is no device `{device}`", hint=f"one of {', '.join(DEVICES)}")
    if dtype not in DTYPES:
        raise UsageError(f"there is no dtype `{dtype}`", hint=f"one of {', '.join(DTYPES)}")
    if device == "auto":
        device = "cuda" if _torch_uses_cuda() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") and _supports_bf16() else "float32"
    return device, dtype


def _torch_uses_cuda() -> bool:
    if not Path("/dev/nvidiactl").exists():
        return False
    import torch

    return torch.cuda.is_available()


def _supports_bf16() -> bool:
    """Return whether the GPU has bf16 units; a plan for a GPU of another machine assumes so."""
    if not Path("/dev/nvidiactl").exists():
        return True
    import torch

    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
