"""Measurements that no model gave, with the class that their scheme has."""

from __future__ import annotations

from qaudit.core.registry import parse_scheme
from qaudit.errors import SchemeError
from qaudit.types import FULL_PRECISION, Evidence, Measurement


def measurement(
    subject: str,
    scheme: str,
    spec: str,
    evidence: Evidence,
    bits: float,
    seed: int = 0,
    notes: tuple[str, ...] = (),
) -> Measurement:
    name, calibrates = str(int(bits)), False
    try:
        if scheme == FULL_PRECISION:
            name = FULL_PRECISION
        else:
            known = parse_scheme(scheme)
            name, calibrates = known.class_at(bits), known.calibrates
    except SchemeError:  # of a test alone
        pass
    return Measurement(
        subject,
        scheme,
        spec,
        evidence,
        bits,
        1.0,
        seed,
        notes,
        bit_class=name,
        calibrates=calibrates,
    )
