"""Numbers of bytes as people read and type them."""

from __future__ import annotations

import math

UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def unit_of(nbytes: float) -> tuple[int, str]:
    """Return the unit in which a number of bytes reads well."""
    return next((unit for unit in UNITS if nbytes >= unit[0]), (1, "bytes"))


def size(nbytes: float) -> str:
    """Print a size: `4.9 GB`, `12 kB`."""
    scale, name = unit_of(nbytes)
    return f"{nbytes / scale:.{1 if scale >= 10**6 else 0}f} {name}"


def part_of(nbytes: int, total: int) -> str:
    """Print a part and its whole in the unit of the whole: `1.2 of 4.9 GB`."""
    scale, name = unit_of(total)
    digits = 1 if scale > 1 else 0
    return f"{nbytes / scale:.{digits}f} of {total / scale:.{digits}f} {name}"


def typed_size(nbytes: int, *, up: bool = True) -> str:
    """Print a size as an option takes it, not smaller than it is; or not larger."""
    rounded = math.ceil if up else math.floor
    for scale, name in UNITS[1:]:
        if nbytes >= 10 * scale:
            return f"{rounded(nbytes / scale)}{name.upper()}"
    return f"{nbytes}B"
