"""What every process that measures a part of a plan must agree on. No torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from qaudit.core.registry import origins
from qaudit.core.scheme import Scheme
from qaudit.errors import MachineError, OtherIdentityError
from qaudit.types import Pins

NUMERICS = 7
"""Raised whenever a published number changes, or evidence gets another one.

2: evidence has the divergence from full precision, and sums by position in the window.
3: gates and routers stay as they are, and a single file of weights is read before an index.
4: losses take powers of two, and divergences are differences of sums where those are exact enough.
5: evidence has divergences and changed tokens by full precision's confidence, and a hash of what is
not quantized.
6: divergences are sums of products with differences of log-probabilities.
What was measured with another version is measured again.
"""

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
