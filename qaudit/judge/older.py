"""What a name tells of a measurement that was saved before rows had their class.

Measurements record `bit_class` and `calibrates`, so that an audit is judged alike where a scheme is
not installed. Of an earlier audit both come from the schemes that are built in.
"""

from __future__ import annotations

import math
import re
from functools import cache

from qaudit.core.registry import parse_scheme, schemes, split_bits
from qaudit.core.scheme import BIT_CLASS, Calibration, Scheme, bit_class_of, class_of_stored
from qaudit.core.shipped import Shipped
from qaudit.errors import SchemeError
from qaudit.types import FULL_PRECISION, Measurement, MeasurementRow


def class_of(measured: Measurement | MeasurementRow) -> str:
    """Return the bits of each weight's code; the scales of groups do not count."""
    if measured.scheme == FULL_PRECISION:
        return FULL_PRECISION
    kind = kind_of(measured.spec) or kind_of(measured.scheme)
    bits = measured.bits_per_weight
    if kind and kind[0].mixes_types:
        return class_of_stored(kind[1], bits)
    # A scheme of another version: scales add less than a bit.
    return kind[1] if kind else str(int(bits) if math.isfinite(bits) else bits)


@cache
def calibrates_by_name(spec: str) -> bool:
    """Return whether a scheme's result depends on the calibration text."""
    try:
        if split_bits(spec.partition(":")[0])[0] not in schemes().built_in:
            return False  # full precision, or a scheme of others: their rows say it
        return parse_scheme(spec).calibrates
    except SchemeError:
        kind = kind_of(spec)  # None: of a later version
        return kind is not None and kind[0].calibration is not Calibration.NONE


@cache
def kind_of(spec: str) -> tuple[type[Scheme], str] | None:
    """Return the plug-in and the bit class of a saved spec; None for one that is not built in.

    Parameters that other versions had do not matter.
    """
    head, *pairs = spec.split(":")
    name, bits = split_bits(head)
    plugin = Shipped if name == Shipped.name else schemes().built_in.get(name)
    if plugin is None:
        return None
    written = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    name = bit_class_of(
        bits or written.get("bits") or plugin.code_bits,
        written.get("act") or getattr(plugin, "act", plugin.act_bits),
        written.get("kv"),
    )
    return (plugin, name) if re.fullmatch(BIT_CLASS, name) else None
