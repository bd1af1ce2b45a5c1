"""An audit with lookups: scores, comparisons, checkpoints and soups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from qaudit.types import FULL_PRECISION, AuditRecord, Comparison, MeasurementRow, Subject


@dataclass(frozen=True, eq=False)
class View:
    """An audit with its lookups."""

    audit: AuditRecord

    @cached_property
    def _scores(self) -> dict[tuple[str, str], MeasurementRow]:
        """Of several draws of calibration text, the pooled score."""
        found: dict[tuple[str, str], MeasurementRow] = {}
        for score in sorted(self.audit.measurements, key=lambda s: s.calibration_seed):
            found.setdefault((score.subject, score.scheme), score)
        for pooled in self.audit.pooled:
            cell = pooled.subject, pooled.scheme
            if cell in found:
                found[cell] = pooled.over(found[cell])
        return found

    def score(self, subject: str, scheme: str = FULL_PRECISION) -> MeasurementRow | None:
        """Return a subject's score under a scheme."""
        return self._scores.get((subject, scheme))

    @cached_property
    def draws(self) -> int:
        """The number of draws of calibration text."""
        return max((pooled.draws for pooled in self.audit.pooled), default=1)

    @cached_property
    def schemes(self) -> tuple[str, ...]:
        """Display names of the quantized schemes, in the order of the audit."""
        names = dict.fromkeys(score.scheme for score in self.audit.measurements)
        return tuple(name for name in names if name != FULL_PRECISION)

    @cached_property
    def of_interest(self) -> tuple[str, ...]:
        """Labels of the pick and the last checkpoint, each once."""
        pick = [self.audit.pick.subject] if self.audit.pick else []
        last = [self.last.label] if self.last else []
        return tuple(dict.fromkeys([*pick, *last]))

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """Subjects with at least one measurement, in series order."""
        measured = {score.subject for score in self.audit.measurements}
        return tuple(s for s in self.audit.subjects if s.label in measured)

    @cached_property
    def checkpoints(self) -> tuple[Subject, ...]:
        """Measured subjects that are checkpoints."""
        return tuple(s for s in self.subjects if s.kind == "checkpoint")

    @cached_property
    def soups(self) -> tuple[Subject, ...]:
        """Measured subjects that are soups."""
        return tuple(s for s in self.subjects if s.kind == "soup")

    @cached_property
    def last(self) -> Subject | None:
        """The last checkpoint of the series."""
        return self.checkpoints[-1] if self.checkpoints else None

    @cached_property
    def stage_end(self) -> Subject | None:
        """The checkpoint that ends the stage before the last checkpoint's own."""
        if self.last is None:
            return None
        before = [
            s
            for s in self.checkpoints
            if s.first.stage is not None and s.first.stage != self.last.first.stage
        ]
        return before[-1] if before else None

    @cached_property
    def documents(self) -> int:
        """Number of evaluation documents, or windows."""
        return max((score.documents for score in self.audit.measurements), default=0)

    @property
    def unit(self) -> str:
        """The unit of sampling: a document, or a window of packed documents."""
        return "window" if self.audit.protocol.get("packed") else "document"

    @cached_property
    def _comparisons(self) -> dict[tuple[str, str, str, str], Comparison]:
        found: dict[tuple[str, str, str, str], Comparison] = {}
        for c in self.audit.comparisons:
            found.setdefault((c.kind, c.scheme, c.a, c.b), c)
        return found

    def compared(self, kind: str, scheme: str, a: str, b: str) -> Comparison | None:
        """Return one comparison."""
        return self._comparisons.get((kind, scheme, a, b))

    @cached_property
    def _opponents(self) -> dict[str, dict[str, None]]:
        found: dict[str, dict[str, None]] = {}
        for c in self.audit.comparisons:
            found.setdefault(c.a, {})[c.b] = None
        return found

    def opponents(self, a: str) -> tuple[str, ...]:
        """Return the subjects that a subject was compared with, in order."""
        return tuple(self._opponents.get(a, ()))

    def best(self, scheme: str, among: tuple[str, ...]) -> str | None:
        """Return the subject with the lowest loss under a scheme."""
        found = list(self._finite(scheme, among))
        return min(found)[1] if found else None

    def _finite(self, scheme: str, among: tuple[str, ...]) -> Iterator[tuple[float, str]]:
        for label in among:
            score = self.score(label, scheme)
            if score is not None and math.isfinite(score.ce.estimate):
                yield score.ce.estimate, label
