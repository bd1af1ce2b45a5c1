"""What every process that measures a part of a plan must agree on. No torch.

Device and dtype are chosen by a rule that gives the same answer every time: float32 on a CPU; bf16
on a GPU that supports it, float32 on others. The plan prints the answer and the run keeps to it.
Both change numbers, so nothing is decided by what is faster; `qaudit doctor` measures that.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qaudit.core.registry import origins
from qaudit.core.scheme import Scheme
from qaudit.errors import MachineError, OtherIdentityError, UsageError
from qaudit.types import Pins

NUMERICS = 3
"""Raised whenever a published number changes, or evidence gets another one.

2: evidence has the divergence from full precision, and sums by position in the window.
3: gates and routers stay as they are, and a single file of weights is read before an index.
Results of earlier versions are read and rendered as they are, and a scan that needs them measures
them again.
"""

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_LIBRARIES = (
    "torch", "transformers", "tokenizers", "bitsandbytes", "safetensors", "numpy", "scipy",
)  # fmt: skip


def libraries(
    schemes: Iterable[Scheme | type[Scheme]] = (), merges: Iterable[str | None] = ()
) -> dict[str, str]:
    """Return the versions of everything that computes, with what such schemes alone need."""
    schemes = tuple(schemes)
    alone = (scheme.extra[0] for scheme in schemes if scheme.extra)
    distributions = (origin.distribution for origin in origins(schemes, merges))
    return _installed((*_LIBRARIES, *alone, *distributions))


version_of = functools.cache(version)  # each call reads and parses a file
"""Returns the version of an installed distribution."""


def _installed(names: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = version_of(name)
        except PackageNotFoundError:
            continue
    return versions


def default_threads() -> int:
    """Return `OMP_NUM_THREADS`, or the number of cores that this process may use."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    if requested.isdecimal() and int(requested) > 0:
        return int(requested)
    available = getattr(os, "sched_getaffinity", None)
    return len(available(0)) if available else os.cpu_count() or 1


def pinned_libraries(
    schemes: Iterable[Scheme], merges: Iterable[str | None] = ()
) -> dict[str, str]:
    """Return the versions that parts must have; torch must be one of them."""
    versions = libraries(schemes, merges)
    if "torch" not in versions:
        raise MachineError(
            "a plan pins the versions of libraries, and torch is not installed here",
            hint="plan in the environment that the parts run in",
        )
    return versions


def refuse_other_libraries(pins: Pins) -> None:
    """Refuse to measure with other versions than those of the plan, each by its name."""
    here = {**_installed({*_LIBRARIES, *pins.libraries}), "qaudit's numerics": str(NUMERICS)}
    planned = {**pins.libraries, "qaudit's numerics": str(pins.numerics)}
    other = [
        f"{name} {here.get(name, 'missing')} instead of {planned.get(name, 'none')}"
        for name in sorted(here.keys() | planned.keys())
        if here.get(name) != planned.get(name)
    ]
    if other:
        raise OtherIdentityError(
            f"this environment has {', '.join(other)}, and such numbers would not compare",
            hint="run the part in the environment of the plan, or plan again in this one",
        )


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
