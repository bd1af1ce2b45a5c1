"""A file that is quantized already, beside schemes: named, compared and stored like one.

Its weights are read and not made, so that it takes no part in the registry of schemes: a plan
writes its canonical form, in which the hash identifies what was measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Calibration, Scheme

LOOKS_BROKEN = "looks broken"
"""What a note of weights that are far from those of the base begins with."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._@+-]+")


@dataclass(frozen=True, kw_only=True)
class Shipped(Scheme):
    """A quantized repository or file, as it ships."""

    name: ClassVar[str] = "shipped"
    calibration: ClassVar[Calibration] = Calibration.NONE

    file: str  # its label, which no other scheme of the audit has
    format: str
    bits: int  # of most codes
    sha256: str  # of weights and quantization configuration
    act: int = 16  # bits of activations, as they are run

    @property
    def short(self) -> str:
        return self.file

    def quantize(self, linears: Linears) -> Quantized:
        """Refuse: the weights are read from the file, whatever the base is."""
        raise NotImplementedError(f"`{self.file}` is quantized already")


def shipped_reference(label: str, format_name: str, bits: int) -> str:
    """Return the note of a base that is quantized already and that others are compared with."""
    return (
        f"`{label}` ships quantized ({format_name}, {bits}-bit): decoded, it is the reference; "
        "added loss, KL divergence and sizes are against the base as it ships"
    )


def label_for(place: str) -> str:
    """Return a place as a part of a canonical form: letters, digits and `._@+-` alone."""
    return _NOT_IN_NAMES.sub("-", place).strip("-") or "file"
