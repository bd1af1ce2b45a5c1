"""Margins as people write them, each in the unit of what it bounds: `2%`, `0.01 nats`.

A bare number is refused: 0.02 is two percent to one reader and 0.02 nats to the other.
"""

from __future__ import annotations

import re

from qaudit.types import UNIT_OF, Metric, Unit

_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
FORM = rf"^\s*{_NUMBER}\s*(%|nats?)\s*$"
"""What a margin looks like, for the published schema."""

_MARGIN = re.compile(rf"\s*(?P<number>{_NUMBER})\s*(?P<unit>%|nats?|)\s*", re.ASCII)
_EXAMPLE: dict[Unit, str] = {"fraction": "2%", "nats": "0.01 nats"}
_MOST = 10.0  # ten times the loss, or ten nats per token: beyond that nothing is left of a model

COMPARES: frozenset[Metric] = frozenset(
    {"loss_against_baseline", "error_against_baseline", "soup_against_members"}
)
"""These may have a margin below zero, which requires an improvement."""


def margin_of(text: str, metric: Metric) -> float:
    """Return a margin as a fraction or in nats per token; ValueError names what is wrong."""
    unit = UNIT_OF[metric]
    example = _EXAMPLE[unit]
    match = _MARGIN.fullmatch(text)
    if match is None:
        raise ValueError(f"`{text}` is no margin; write it as `{example}`")
    if not match["unit"]:
        raise ValueError(f"`{text}` has no unit; write it as `{example}`")
    if (match["unit"] == "%") != (unit == "fraction"):
        named = "a percentage" if unit == "fraction" else "in nats per token"
        raise ValueError(f"`{text}` is no margin of `{metric}`; it is {named}: `{example}`")
    value = float(match["number"]) / (100 if unit == "fraction" else 1)
    least = -_MOST if metric in COMPARES else 0.0
    if not least <= value <= _MOST:
        bounds = f"between {_written(least, unit)} and {_written(_MOST, unit)}"
        raise ValueError(f"a margin of `{text}` is impossible; it must be {bounds}")
    return value


def _written(value: float, unit: Unit) -> str:
    return f"{100 * value:g}%" if unit == "fraction" else f"{value:g} nats"
