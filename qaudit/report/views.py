"""An audit with lookups: scores, comparisons, checkpoints, soups, and the checks of a policy.

A breach that is ignored, with a reason, keeps its mark: ignoring it changes the outcome of the
gate and not the number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from qaudit.types import (
    CODE_OF,
    FULL_PRECISION,
    AuditRecord,
    Comparison,
    Finding,
    Interval,
    MeasurementRow,
    Subject,
)

BREACH, UNCLEAR = "!", "?"

MARGINS = frozenset(CODE_OF.values())
"""Rules that compare a number of one subject and scheme with a margin."""

ABOUT_A_POLICY = MARGINS | {"QA025", "QA026", "QA027"}
"""These, and what is wrong with how much was measured, or with the policy itself."""


@dataclass(frozen=True)
class SoupRow:
    """A soup against one of its ingredients under one scheme."""

    scheme: str
    opponent: str
    outright: Comparison
    difference: Comparison
    relative: Comparison | None
    is_best: bool  # the ingredient with the lowest loss under this scheme


@dataclass(frozen=True, eq=False)
class View:
    """An audit with its lookups."""

    audit: AuditRecord

    @cached_property
    def _scores(self) -> dict[tuple[str, str], MeasurementRow]:
        """Of several draws of calibration text, the pooled score."""
        scores: dict[tuple[str, str], MeasurementRow] = {}
        for score in sorted(self.audit.measurements, key=lambda s: s.calibration_seed):
            scores.setdefault((score.subject, score.scheme), score)
        for pooled in self.audit.pooled:
            cell = pooled.subject, pooled.scheme
            if cell in scores:
                scores[cell] = pooled.over(scores[cell])
        return scores

    def score(self, subject: str, scheme: str = FULL_PRECISION) -> MeasurementRow | None:
        """Return a subject's score under a scheme."""
        return self._scores.get((subject, scheme))

    def error(self, subject: str, scheme: str) -> Interval | None:
        """Return a subject's relative error under a scheme."""
        score = self.score(subject, scheme)
        return score.relative_error if score else None

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
        return {(c.kind, c.scheme, c.a, c.b): c for c in reversed(self.audit.comparisons)}

    def compared(self, kind: str, scheme: str, a: str, b: str) -> Comparison | None:
        return self._comparisons.get((kind, scheme, a, b))

    @cached_property
    def _opponents(self) -> dict[str, dict[str, None]]:
        opponents: dict[str, dict[str, None]] = {}
        for c in self.audit.comparisons:
            opponents.setdefault(c.a, {})[c.b] = None
        return opponents

    def against(self, soup: Subject) -> tuple[SoupRow, ...]:
        """Return a soup's comparisons with its ingredients, scheme by scheme."""
        opponents = tuple(self._opponents.get(soup.label, ()))
        rows: list[SoupRow] = []
        for scheme in self.schemes:
            best = self.best(scheme, opponents)
            for opponent in opponents:
                pair = scheme, soup.label, opponent
                outright = self.compared("outright", *pair)
                difference = self.compared("difference_of_differences", *pair)
                if outright is None or difference is None:
                    continue
                relative = self.compared("relative_error_difference", *pair)
                is_best = opponent == best
                rows.append(SoupRow(scheme, opponent, outright, difference, relative, is_best))
        return tuple(rows)

    def best(self, scheme: str, among: Iterable[str] | None = None) -> str | None:
        """Return the subject with the lowest loss under a scheme, of all or among some."""
        labels = [subject.label for subject in self.subjects] if among is None else among
        losses = [
            (score.ce.estimate, label)
            for label in labels
            if (score := self.score(label, scheme)) and math.isfinite(score.ce.estimate)
        ]
        return min(losses)[1] if losses else None


# --------------------------------------------------------------------- checks of a policy


def policy_findings(view: View) -> tuple[Finding, ...]:
    """Return the checks of numbers against margins, in the order of the policy."""
    return tuple(f for f in view.audit.findings if f.rule in MARGINS)


def is_ignored(finding: Finding) -> bool:
    """Return whether a check did not pass and is ignored, with a reason."""
    bad = finding.rule in ABOUT_A_POLICY and finding.outcome != "pass"
    return bad and finding.level == "info"


def judged(view: View, subject: str, scheme: str) -> tuple[Finding, ...]:
    """Return the checks of one subject under one scheme."""
    return tuple(f for f in policy_findings(view) if (f.subject, f.scheme) == (subject, scheme))


def marks(view: View) -> dict[tuple[str, str], str]:
    """Return the mark of every cell that breaches a margin, or may; a breach outweighs a doubt."""
    signs: dict[tuple[str, str], str] = {}
    for finding in policy_findings(view):
        if finding.scheme is None or finding.outcome == "pass":
            continue
        cell = finding.subject, finding.scheme
        mark = BREACH if finding.outcome == "fail" else UNCLEAR
        if signs.get(cell) != BREACH:
            signs[cell] = mark
    return signs
