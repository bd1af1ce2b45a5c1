"""Look up measurements by subject and scheme; refuse those that cannot be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from qaudit.core.course import ends
from qaudit.errors import AuditError
from qaudit.types import FULL_PRECISION, Evidence, Measurement, Subject

Cell = tuple[str, str]
"""A subject, and a scheme by its display name."""

Sums = Callable[[Evidence], npt.NDArray[np.float64]]
"""What is summed over the tokens of each document."""


def losses(evidence: Evidence) -> npt.NDArray[np.float64]:
    return evidence.nll_sum


def divergences(evidence: Evidence) -> npt.NDArray[np.float64]:
    """Return the KL divergence of each document to full precision; NaN if it was not measured."""
    fidelity = evidence.fidelity
    return fidelity.kl_sum if fidelity else np.full(len(evidence.tokens), np.nan)


EvidenceFiles = Mapping[tuple[str, str, int | str], tuple[str, str]]
"""(subject, spec, calibration seed, or a task) -> (path beside audit.json, sha256)."""


@dataclass(frozen=True, eq=False)
class Measurements:
    """Measurements on the same documents, found by subject and scheme."""

    subjects: tuple[Subject, ...]
    measurements: tuple[Measurement, ...]
    confidence: float

    @classmethod
    def of(
        cls, subjects: Sequence[Subject], measurements: Sequence[Measurement], confidence: float
    ) -> Measurements:
        """Build a table, or refuse measurements that cannot be compared."""
        if not 0 < confidence < 1:
            raise AuditError(
                f"a confidence of {confidence} is not between 0 and 1", hint="use 0.95, for example"
            )
        labels = [s.label for s in subjects]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise AuditError(
                f"two subjects are named `{twice[0]}`", hint="give every subject its own label"
            )
        seen: set[tuple[str, str, int]] = set()
        for m in measurements:
            if m.subject not in labels:
                raise AuditError(
                    f"`{m.subject}` was measured and is no subject of this audit",
                    hint="evidence of another audit may be in the same folder",
                )
            if (key := (m.subject, m.spec, m.calibration_seed)) in seen:
                raise AuditError(
                    f"`{m.subject}` was measured twice under `{m.scheme}`",
                    hint="one measurement for each subject, scheme and calibration seed",
                )
            seen.add(key)
        _refuse_other_documents(measurements)
        return cls(tuple(subjects), tuple(measurements), confidence)

    @cached_property
    def first_draws(self) -> Measurements:
        """The measurements that are judged: the first draw of calibration text of each cell."""
        first = tuple(draws[0] for draws in self._draws.values())
        if len(first) == len(self.measurements):
            return self
        kept = set(map(id, first))
        return replace(self, measurements=tuple(m for m in self.measurements if id(m) in kept))

    @cached_property
    def _draws(self) -> dict[Cell, list[Measurement]]:
        return by_cell(self.measurements)

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(dict.fromkeys((m.subject, m.scheme) for m in self.measurements))

    def draws(self, subject: str, scheme: str) -> tuple[Measurement, ...]:
        return tuple(self._draws.get((subject, scheme), ()))

    def find(self, subject: str, scheme: str) -> Measurement | None:
        """Return the measurement of a subject under a scheme: of several draws, the first."""
        return next(iter(self.draws(subject, scheme)), None)

    def full(self, subject: str) -> Measurement | None:
        return self.find(subject, FULL_PRECISION)

    @cached_property
    def quantized_schemes(self) -> tuple[str, ...]:
        names = dict.fromkeys(m.scheme for m in self.measurements)
        return tuple(name for name in names if name != FULL_PRECISION)

    @cached_property
    def class_of(self) -> Mapping[str, str]:
        """The bit class of each scheme."""
        return {m.scheme: m.bit_class for m in self.measurements}

    @cached_property
    def documents(self) -> int:
        """Number of documents with at least one scored token; the same for all measurements."""
        if not self.measurements:
            return 0
        return int((self.measurements[0].evidence.tokens > 0).sum())

    def scored(self) -> npt.NDArray[np.bool_]:
        return self.measurements[0].evidence.scored()

    @cached_property
    def last_checkpoint(self) -> str | None:
        labels = [s.label for s in self.subjects if s.kind == "checkpoint"]
        return labels[-1] if labels else None

    def series_ends(self) -> tuple[str, ...]:
        """Return the last checkpoint, and the last ones of the ingredients beside it."""
        singles = [s for s in self.subjects if s.kind == "checkpoint"]
        return tuple(singles[k].label for k in ends([s.first for s in singles]))

    def stage_ends(self) -> tuple[str, ...]:
        ends = {
            s.first.stage: s.label
            for s in self.subjects
            if s.kind == "checkpoint" and s.first.stage is not None
        }
        return tuple(label for label in ends.values() if label != self.last_checkpoint)

    def members(self, soup: Subject) -> tuple[str, ...]:
        singles = {s.first: s.label for s in self.subjects if s.kind == "checkpoint"}
        labels = (singles.get(checkpoint) for checkpoint, _ in soup.members)
        return tuple(dict.fromkeys(label for label in labels if label is not None))


def by_cell(measurements: Iterable[Measurement]) -> dict[tuple[str, str], list[Measurement]]:
    draws: dict[tuple[str, str], list[Measurement]] = {}
    for m in sorted(measurements, key=lambda m: m.calibration_seed):
        draws.setdefault((m.subject, m.scheme), []).append(m)
    return draws


def is_finite(measurement: Measurement) -> bool:
    return bool(np.isfinite(measurement.evidence.nll_sum).all())


def _refuse_other_documents(measurements: Sequence[Measurement]) -> None:
    for m in measurements[1:]:
        first = measurements[0]
        if m.evidence.document_sha256 != first.evidence.document_sha256:
            what, hint = "documents", "measure both on the same evaluation text and protocol"
        elif not np.array_equal(m.evidence.tokens, first.evidence.tokens):
            what, hint = "tokens", "different tokenizers compare only in bits per byte"
        else:
            continue
        raise AuditError(
            f"`{m.subject}` under `{m.scheme}` and `{first.subject}` under `{first.scheme}` "
            f"were measured on different {what}",
            hint=hint,
        )
