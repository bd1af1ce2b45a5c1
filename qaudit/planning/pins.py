"""What every process that measures a part of a plan must agree on. No torch."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from qaudit.errors import MachineError, OtherIdentityError
from qaudit.types import Pins

NUMERICS = 2
"""Raised whenever a published number changes, or evidence gets another one.

2: evidence has the divergence from full precision, and sums by position in the window. Results of
version 1 are read and rendered as they are, and a scan that needs them measures them again.
"""

_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "bitsandbytes",
    "safetensors",
    "numpy",
    "scipy",
)


def libraries() -> dict[str, str]:
    """Return the versions of everything that computes."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def default_threads() -> int:
    """Return `OMP_NUM_THREADS`, or the number of cores that this process may use."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    return int(requested) if requested.isdecimal() and int(requested) > 0 else _cores()


def _cores() -> int:
    available = getattr(os, "sched_getaffinity", None)
    return len(available(0)) if available else os.cpu_count() or 1


def pinned_libraries() -> dict[str, str]:
    """Return the versions that parts must have; torch must be one of them."""
    versions = libraries()
    if "torch" not in versions:
        raise MachineError(
            "a plan pins the versions of libraries, and torch is not installed here",
            hint="plan in the environment that the parts run in",
        )
    return versions


def refuse_other_libraries(pins: Pins) -> None:
    """Refuse to measure with other versions than those of the plan, each by its name."""
    here = {**libraries(), "qaudit's numerics": str(NUMERICS)}
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
