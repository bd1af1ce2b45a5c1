"""The audit that a policy is applied to: measurements, their protocol, and what is missing.

Selectors choose the subjects of a rule among those that were *planned*: where the last checkpoint
could not be measured, `@last` is still that one and not the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from qaudit.judge.pick import choose
from qaudit.judge.table import Table
from qaudit.types import FULL_PRECISION, HELD_OUT, AuditRecord, Pick, Subject

PICK = "@pick"


@dataclass(frozen=True, eq=False)
class Held:
    """An audit's measurements and protocol, and the subjects that were planned."""

    table: Table
    name: str = "audit"
    planned: tuple[Subject, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)  # label -> why
    protocol: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""

    @classmethod
    def of(cls, audit: AuditRecord, table: Table, name: str) -> Held:
        """Build it from a saved audit and the table of its evidence."""
        measured = {m.subject for m in table.measurements}
        planned = {s.label for s in audit.plan.subjects} - measured
        return cls(
            table=table,
            name=name,
            planned=audit.plan.subjects,
            skipped={s.subject: s.reason for s in audit.skipped if s.subject in planned},
            protocol={"context": audit.plan.context, **audit.protocol},
            dtype=audit.plan.dtype,
        )

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """The subjects that were planned or measured, in the order of the plan.

        A search for a soup may end without one: it was planned, and there is no soup to judge.
        """
        known = {s.label: s for s in self.table.subjects}
        found = {s.label: known.get(s.label, s) for s in (*self.planned, *self.table.subjects)}
        return tuple(s for s in found.values() if s.label in known or s.label in self.skipped)

    @cached_property
    def pick(self) -> Pick | None:
        """The subject and scheme to ship, by the evidence."""
        return choose(self.table)

    @cached_property
    def pick_split(self) -> str | None:
        """The documents to judge the pick on: those it was not chosen on, if it was chosen."""
        chosen = self.pick is not None and self.pick.runner_up is not None
        return HELD_OUT if chosen and self.table.is_split else None

    def chosen(self, selectors: Iterable[str]) -> dict[str, str | None]:
        """Return labels, each with the split to judge it on."""
        named: dict[str, str | None] = {}
        for selector in selectors:
            for label in self._labels(selector):
                alone = selector == PICK and self.pick is not None
                split = self.pick_split if alone else None
                named[label] = split if label not in named else (named[label] and split)
        order = {s.label: k for k, s in enumerate(self.subjects)}
        return dict(sorted(named.items(), key=lambda pair: order[pair[0]]))

    def _labels(self, selector: str) -> list[str]:
        every = self.subjects
        checkpoints = [s.label for s in every if s.kind == "checkpoint"]
        if selector == PICK:
            # Where no loss is finite there is no pick, and every subject is a breach.
            return [self.pick.subject] if self.pick else [s.label for s in self.table.subjects]
        if selector == "@last":
            return checkpoints[-1:]
        if selector == "@checkpoints":
            return checkpoints
        if selector == "@soups":
            return [s.label for s in every if s.kind == "soup"]
        if selector == "@all":
            return [s.label for s in every]
        return [s.label for s in every if matches(s.label, selector)]

    def schemes(self, globs: Iterable[str]) -> list[str]:
        """Return the measured schemes that some glob matches; full precision only by its name."""
        globs = tuple(globs)
        known = self.table.quantized_schemes
        found = [name for name in known if any(matches(name, glob) for glob in globs)]
        return [FULL_PRECISION, *found] if FULL_PRECISION in globs else found


def matches(name: str, glob: str) -> bool:
    """Whether a name equals a glob, or matches it."""
    return name == glob or fnmatchcase(name, glob)
