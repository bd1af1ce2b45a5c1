"""What was measured: per-document sums, and what was left out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qaudit.types.text import HELD_OUT, SELECTION


@dataclass(frozen=True, eq=False)
class Evidence:
    """Per-document sums: enough to recompute every interval on a machine without torch."""

    document_sha256: tuple[str, ...]
    nll_sum: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    split: tuple[str, ...]
    choice_nll: npt.NDArray[np.float64] | None = None
    choice_items: npt.NDArray[np.int64] | None = None
    choice_answers: npt.NDArray[np.int64] | None = None

    @property
    def is_split(self) -> bool:
        """Return whether some documents are for choosing and others for reporting."""
        return {SELECTION, HELD_OUT} <= set(self.split)

    def scored(self, split: str | None = None) -> npt.NDArray[np.bool_]:
        """Mark the documents with a scored token, of one split where there are two."""
        marked: npt.NDArray[np.bool_] = self.tokens > 0
        if split is not None and self.is_split:
            marked &= np.array(self.split) == split
        return marked


@dataclass(frozen=True, eq=False)
class Measurement:
    """One subject under one scheme, as it came out of the engine."""

    subject: str
    scheme: str
    spec: str
    evidence: Evidence
    bits_per_weight: float
    seconds: float
    calibration_seed: int = 0
    notes: tuple[str, ...] = ()
    weights_sha256: dict[str, str] = field(default_factory=dict)  # of the files as they were read


@dataclass(frozen=True)
class Skipped:
    """What was planned and not measured, and why."""

    subject: str
    scheme: str | None
    reason: str
