"""An audit with lookups: the verdict, scores, comparisons, checkpoints and soups."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from qaudit.core.course import ends, on_trunk, place
from qaudit.judge.scores import first_rows
from qaudit.types import (
    FULL_PRECISION,
    METRICS,
    AuditRecord,
    ClassVerdict,
    Comparison,
    Interval,
    MeasurementRow,
    Subject,
)

ABOUT_A_POLICY = frozenset(
    (*(record.code for record in METRICS.values()), "QA025", "QA026", "QA027", "QA040")
)
"""Checks of numbers against margins, of how much was measured, and of the policy itself."""


@dataclass(frozen=True)
class SoupRow:
    """A soup against one of its ingredients under one scheme."""

    scheme: str
    opponent: str
    outright: Comparison
    difference: Comparison
    relative: Comparison | None
    is_best: bool  # the ingredient with the lowest loss under this scheme


@dataclass(frozen=True)
class Axis:
    """The course of a series: the unit and the place of every subject, by its label.

    Soups, which are only made of checkpoints, are a little after the last one.
    `trunk` is the main line: of parallel ingredients, the longest one. What does not come later on
    it begins another of its `runs`. In each of `falls`, from begin to end, the learning rate falls;
    None where it is not known all along.
    """

    name: str
    places: dict[str, float]
    stage_ends: dict[str, float]
    trunk: tuple[Subject, ...]
    runs: list[list[Subject]]
    falls: list[tuple[float, float]] | None


@dataclass(frozen=True, eq=False)
class View:
    """An audit with its lookups."""

    audit: AuditRecord

    @cached_property
    def _scores(self) -> dict[tuple[str, str], MeasurementRow]:
        return first_rows(self.audit.measurements)

    def score(self, subject: str, scheme: str = FULL_PRECISION) -> MeasurementRow | None:
        return self._scores.get((subject, scheme))

    def error(self, subject: str, scheme: str) -> Interval | None:
        score = self.score(subject, scheme)
        return score.relative_error if score else None

    @cached_property
    def mixture(self) -> MeasurementRow | None:
        """The mixture of bits that ships, or else the one of fewest nats."""
        rows = [row for row in self._scores.values() if row.mixture]
        main = self.main
        ships = [r for r in rows if main and (r.subject, r.scheme) == (main.subject, main.scheme)]
        return min(ships or rows, key=lambda row: row.ce.estimate, default=None)

    @cached_property
    def draws(self) -> int:
        return max((row.draws for row in self.audit.diagnostics.noise), default=1)

    @cached_property
    def schemes(self) -> tuple[str, ...]:
        names = dict.fromkeys(score.scheme for score in self.audit.measurements)
        return tuple(name for name in names if name != FULL_PRECISION)

    @property
    def classes(self) -> tuple[ClassVerdict, ...]:
        """The classes of the verdict; none without one."""
        return self.audit.verdict.classes if self.audit.verdict else ()

    @cached_property
    def ships(self) -> tuple[tuple[str, str], ...]:
        """The subject and the scheme of every class that has them, each pair once."""
        pairs = ((one.subject, one.scheme) for one in self.classes)
        return tuple(dict.fromkeys((a, b) for a, b in pairs if a and b))

    @cached_property
    def main(self) -> ClassVerdict | None:
        """The class that decides: of those that the policy demands the one with its status."""
        levels = ("error", "warn", "off")
        status = self.audit.verdict.status if self.audit.verdict else None
        return min(
            (decision for decision in self.classes if decision.subject),
            key=lambda decision: (
                levels.index(decision.level),
                decision.status != status,
                decision.bit_class.zfill(9),  # then the fewest bits
            ),
            default=None,
        )

    @cached_property
    def of_interest(self) -> tuple[str, ...]:
        """Labels of what the verdict names and the last checkpoint, each once."""
        last = [self.last.label] if self.last else []
        return tuple(dict.fromkeys([*(subject for subject, _ in self.ships), *last]))

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """Subjects with at least one measurement, in series order."""
        measured = {score.subject for score in self.audit.measurements}
        return tuple(s for s in self.audit.subjects if s.label in measured)

    @cached_property
    def checkpoints(self) -> tuple[Subject, ...]:
        return tuple(s for s in self.subjects if s.kind == "checkpoint")

    @cached_property
    def soups(self) -> tuple[Subject, ...]:
        return tuple(s for s in self.subjects if s.kind == "soup")

    @cached_property
    def last(self) -> Subject | None:
        return self.checkpoints[-1] if self.checkpoints else None

    @cached_property
    def ends(self) -> tuple[Subject, ...]:
        return tuple(self.checkpoints[k] for k in ends([s.first for s in self.checkpoints]))

    @cached_property
    def stage_end(self) -> Subject | None:
        """The last checkpoint of the stage before that of the last one."""
        final = self.last.first.stage if self.last else None
        before = (s for s in reversed(self.checkpoints) if s.first.stage not in (None, final))
        return next(before, None)

    @cached_property
    def axis(self) -> Axis:
        """Place checkpoints by tokens where all know theirs, else by step, else by their order."""
        firsts = [s.first for s in self.checkpoints]
        placed = place(firsts)
        at = {s.label: x for s, x in zip(self.checkpoints, placed.positions, strict=True)}
        stage_ends: dict[str, float] = {}
        for s in self.checkpoints:
            if (stage := s.first.stage) is not None:
                stage_ends[stage] = max(stage_ends.get(stage, at[s.label]), at[s.label])
        trunk = tuple(s for s, on in zip(self.checkpoints, on_trunk(firsts), strict=True) if on)
        runs: list[list[Subject]] = []
        for s in trunk:
            if runs and at[s.label] > at[runs[-1][-1].label]:
                runs[-1].append(s)
            else:
                runs.append([s])
        falls: list[tuple[float, float]] | None = None
        if len(trunk) > 1 and all(s.first.learning_rate is not None for s in trunk):
            falls = []
            for a, b in (pair for run in runs for pair in pairwise(run)):
                before, after = a.first.learning_rate or 0.0, b.first.learning_rate or 0.0
                if after < before and not math.isclose(before, after, rel_tol=1e-6):
                    begin = at[a.label]
                    if falls and falls[-1][1] == begin:
                        begin, _ = falls.pop()
                    falls.append((begin, at[b.label]))
        high = max(at.values(), default=0.0)
        step = min(0.045, 0.2 / (len(self.soups) or 1)) * (high - min(at.values(), default=0.0))
        at |= {soup.label: high + step * k for k, soup in enumerate(self.soups, 1)}
        return Axis(placed.unit, at, stage_ends, trunk, runs, falls)

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

    def against(self, soup: Subject) -> tuple[SoupRow, ...]:
        opponents = tuple(dict.fromkeys(c.b for c in self.audit.comparisons if c.a == soup.label))
        rows: list[SoupRow] = []
        for scheme in self.schemes:
            best = self.best(scheme, opponents)
            for opponent in opponents:
                pair = scheme, soup.label, opponent
                outright = self.compared("outright", *pair)
                difference = self.compared("difference_of_differences", *pair)
                if outright is not None and difference is not None:
                    relative = self.compared("relative_error_difference", *pair)
                    is_best = opponent == best
                    rows.append(SoupRow(scheme, opponent, outright, difference, relative, is_best))
        return tuple(rows)

    def best(self, scheme: str, among: Iterable[str] | None = None) -> str | None:
        labels = [subject.label for subject in self.subjects] if among is None else among
        losses = [
            (score.ce.estimate, label)
            for label in labels
            if (score := self.score(label, scheme)) and math.isfinite(score.ce.estimate)
        ]
        return min(losses)[1] if losses else None


def judged(score: MeasurementRow, decision: ClassVerdict) -> MeasurementRow:
    """Return a row with the verdict's own numbers, if it is of what that names."""
    cell = decision.subject, decision.scheme
    if decision.ce is None or decision.documents is None or cell != score.cell:
        return score
    names = ("ce", "relative_error", "kl", "documents")
    return replace(score, **{name: getattr(decision, name) for name in names})
