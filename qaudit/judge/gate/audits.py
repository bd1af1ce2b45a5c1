"""The audit that a policy is applied to, and the previous release as its baseline.

Selectors choose the subjects of a rule among those that were *planned*: where the last checkpoint
could not be measured, `@last` is still that one and not the one before it.

A quantized loss is compared on the same documents, token by token, so that everything which
moves it must be the same: a difference in text, cutting, precision or tokenizer is refused by
name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np

from qaudit.core.registry import parse_scheme
from qaudit.errors import UsageError
from qaudit.judge.choose import LOSS, MAIN, ClassChoice, Objective, choices, class_verdict, pick_of
from qaudit.judge.table import Cell, Measurements
from qaudit.types import FULL_PRECISION, AuditRecord, ClassVerdict, Level, Pick, PolicyRule, Subject

PICK, SHIPS = "@pick", "@ships"
_BASELINE = "\0"
"""Begins the labels of a baseline in a table of both, and no label of an audit."""


@dataclass(frozen=True, eq=False)
class GateInput:
    """An audit's measurements and protocol, and the subjects that were planned."""

    table: Measurements
    name: str = "audit"
    planned: tuple[Subject, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)  # label -> why
    protocol: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""
    searched: Mapping[str, int] = field(default_factory=dict)  # means tried, by searched soup
    bits: tuple[str, ...] = ()  # the classes to decide; empty: all that were measured
    objective: Objective = LOSS
    lost: tuple[tuple[str, str], ...] = ()  # planned, and neither measured nor skipped
    settled: tuple[ClassChoice, ...] | None = None  # under a policy; None: before one is applied

    @classmethod
    def of(
        cls,
        audit: AuditRecord,
        table: Measurements,
        name: str,
        bits: tuple[str, ...] = (),
        objective: Objective = LOSS,
    ) -> GateInput:
        measured = {m.subject for m in table.measurements}
        missing = {s.label for s in audit.plan.subjects} - measured
        return cls(
            table=table,
            name=name,
            planned=audit.plan.subjects,
            skipped={s.subject: s.reason for s in audit.skipped if s.subject in missing},
            protocol={"context": audit.plan.context, **audit.protocol},
            dtype=audit.plan.dtype,
            searched={soup.label: soup.counted for soup in audit.diagnostics.greedy},
            bits=bits or audit.plan.recipe.bits,
            objective=objective,
            lost=tuple(_lost(audit, table)),
        )

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """The subjects that were planned or measured, in the order of the plan.

        A search for a soup may end without one: it was planned, and there is no soup to judge.
        """
        by_label = {s.label: s for s in self.table.subjects}
        every = {s.label: by_label.get(s.label, s) for s in (*self.planned, *self.table.subjects)}
        return tuple(s for s in every.values() if s.label in by_label or s.label in self.skipped)

    @cached_property
    def made(self) -> tuple[ClassChoice, ...]:
        """The candidates of each bit class."""
        if self.settled is not None:
            return self.settled
        return choices(self.table, self.objective, self.bits, self.searched)

    @cached_property
    def choices(self) -> tuple[ClassVerdict, ...]:
        """The subject and scheme of each bit class, before a policy judges it."""
        return tuple(class_verdict(self.table, choice) for choice in self.made)

    def chosen_among(self, label: str, scheme: str) -> tuple[int, tuple[Cell, ...]]:
        """Return of how many a cell was chosen, and these; of a pick at another scheme, its own."""
        name = self.table.class_of.get(scheme)
        of_class = {choice.bit_class: choice for choice in self.made}
        for key in (name, MAIN, *of_class):
            choice = of_class.get(key or "")
            if choice is None or (ships := choice.ships) is None:
                continue
            if ships.cell == (label, scheme):
                return choice.at_once, choice.cells
            if ships.subject == label and key != name:
                return choice.at_once, ()
        return 1, ()

    @cached_property
    def pick(self) -> Pick | None:
        return pick_of(self.choices)

    def shipped(self, rule: PolicyRule, classes: Mapping[str, Level]) -> tuple[Cell, ...]:
        """Return the cells that ship of the rule's classes.

        Where no loss of a class is finite, everything in it is a breach.
        """
        cells: dict[Cell, None] = {}
        for choice in self.made:
            if covers_class(rule, choice.bit_class, classes):
                every = [m for m in self.table.measurements if m.bit_class == choice.bit_class]
                of_class = (m.cell for m in ([choice.ships] if choice.ships else every))
                cells |= {cell: None for cell in of_class if matches_any(cell[1], rule.schemes)}
        return tuple(cells)

    def labels(self, selectors: Iterable[str]) -> tuple[str, ...]:
        order = {s.label: k for k, s in enumerate(self.subjects)}
        labels = {label for selector in selectors for label in self._labels(selector)}
        return tuple(sorted(labels, key=order.__getitem__))

    def _labels(self, selector: str) -> list[str]:
        if selector == PICK:
            # Where no loss is finite there is no pick, and every subject is a breach.
            return [self.pick.subject] if self.pick else [s.label for s in self.table.subjects]
        if selector == SHIPS:
            return [chosen.subject for chosen in self.choices if chosen.subject is not None]
        if selector in ("@checkpoints", "@last", "@soups"):
            kind = "soup" if selector == "@soups" else "checkpoint"
            labels = [s.label for s in self.subjects if s.kind == kind]
            return labels[-1:] if selector == "@last" else labels
        return [s.label for s in self.subjects if selector == "@all" or matches(s.label, selector)]

    def schemes(self, globs: Sequence[str], bits: Sequence[str] = ()) -> list[str]:
        """Return the measured schemes that some glob matches; full precision only by its name."""
        matching = [name for name in self.table.quantized_schemes if matches_any(name, globs)]
        if bits:
            return [name for name in matching if self.table.class_of[name] in bits]
        return [FULL_PRECISION, *matching] if FULL_PRECISION in globs else matching

    def not_measured(self, label: str) -> str:
        return f"`{label}` was planned and not measured: {self.skipped[label]}"


def covers_class(rule: PolicyRule, name: str, classes: Mapping[str, Level]) -> bool:
    is_named = not rule.bits or name in rule.bits
    return is_named and not (classes and classes.get(name, "off") == "off")


def _lost(audit: AuditRecord, table: Measurements) -> Iterator[tuple[str, str]]:
    """Yield subject and scheme of what the plan has and the audit does not account for."""
    shorts = {m.spec: m.scheme for m in table.measurements}
    measured = {(m.subject, m.spec) for m in table.measurements}
    skipped = {(skipped.subject, skipped.scheme) for skipped in audit.skipped}
    labels = {label for label, _ in measured}
    for subject in audit.plan.subjects:
        if (subject.label, None) in skipped or (subject.is_search and subject.label not in labels):
            continue
        for spec in (*([FULL_PRECISION] if FULL_PRECISION in shorts else []), *audit.plan.specs):
            short = shorts.get(spec, spec)
            with suppress(UsageError):  # of another installation
                short = shorts.get(spec) or parse_scheme(spec).short
            if (subject.label, spec) not in measured and (subject.label, short) not in skipped:
                yield subject.label, short


def matches(name: str, glob: str) -> bool:
    """Whether a name equals a glob, or matches it."""
    return name == glob or fnmatchcase(name, glob)


def matches_scheme(name: str, glob: str) -> bool:
    """Whether a scheme equals a glob, or matches it with its parameters or without."""
    head = re.split(r":| \(", name, maxsplit=1)[0]
    return matches(name, glob) or (any(sign in glob for sign in "*?[") and matches(head, glob))


def matches_any(name: str, globs: Iterable[str]) -> bool:
    return any(matches_scheme(name, glob) for glob in globs)


@dataclass(frozen=True, eq=False)
class Pair:
    """An audit's baseline, and one table of both, in which labels of the baseline have a prefix."""

    baseline: GateInput
    joint: Measurements

    @classmethod
    def of(cls, audit: GateInput, baseline: GateInput) -> Pair:
        if (difference := next(_differences(audit, baseline), None)) is not None:
            raise UsageError(difference, hint=_ALIKE)
        table = baseline.table
        subjects = (replace(s, label=_BASELINE + s.label) for s in table.subjects)
        measured = (replace(m, subject=_BASELINE + m.subject) for m in table.measurements)
        joint = Measurements.of(
            (*audit.table.subjects, *subjects),
            (*audit.table.measurements, *measured),
            audit.table.confidence,
        )
        return cls(baseline, joint)

    def cell(self, theirs: Cell) -> Cell:
        """Return a cell of the baseline as it is called in the table of both."""
        return _BASELINE + theirs[0], theirs[1]

    def partner(self, rule: PolicyRule, label: str, scheme: str, name: str | None) -> Cell | None:
        """Return the cell of the baseline that a subject at a scheme of a class is compared with.

        It is the subject of the same label if the rule is about that there, too, and otherwise
        what the baseline's own evidence picks: `@pick` is compared with the pick of then, and
        `@ships` with what shipped then in the same bit class, whatever its scheme.
        """
        if rule.subjects == (SHIPS,):
            shipped = (choice for choice in self.baseline.choices if choice.bit_class == name)
            then = next(shipped, None)
            if then is None or then.subject is None or then.scheme is None:
                return None
            return then.subject, then.scheme
        if label in self.baseline.labels(rule.subjects) and label not in self.baseline.skipped:
            return label, scheme
        return (self.baseline.pick.subject, scheme) if self.baseline.pick else None


_PROTOCOL = {
    "dtype": "in {}",
    "context": "with a context of {} tokens",
    "bos": "with `bos={}`",
    "packed": "with `packed={}`",
    "document_tokens": "with documents of at most {} tokens",
    "calibration_documents": "with {} calibration documents",
    "calibration_seed": "with calibration seed {}",
}
_IN_WORDS = {"None": "no limit", "True": "true", "False": "false"}
_ALIKE = "measure both with the same protocol and text; such numbers do not compare"


def _differences(audit: GateInput, baseline: GateInput) -> Iterator[str]:
    """Yield why numbers of two audits do not compare."""
    sides, both = (audit, baseline), f"`{audit.name}` and `{baseline.name}`"
    for key, text in _PROTOCOL.items():
        values = [{**side.protocol, "dtype": side.dtype}.get(key) for side in sides]
        if values[0] != values[1]:
            how = [text.format(_IN_WORDS.get(repr(value), value)) for value in values]
            yield f"`{audit.name}` was measured {how[0]} and `{baseline.name}` {how[1]}"
    evidence, before = (side.table.measurements[0].evidence for side in sides)
    if evidence.document_sha256 != before.document_sha256:
        counts = [len(each.document_sha256) for each in (evidence, before)]
        common = len({*evidence.document_sha256} & {*before.document_sha256})
        yield (
            f"`{audit.name}` was measured on {counts[0]} documents and `{baseline.name}` on "
            f"{counts[1]}, of which {common} are the same"
            + (", in another order" if common == counts[0] else "")
        )
    if not np.array_equal(evidence.tokens, before.tokens):
        yield (
            f"{both} count other tokens in the same documents: they have different tokenizers, "
            "which `bits_per_byte` alone compares"
        )
    # Each release writes rollouts of its own: no rule compares them with a baseline's.
    ours, theirs = (
        side.protocol.get("documents_sha256") or side.protocol.get("corpus_sha256")
        for side in sides
    )
    if ours and theirs and ours != theirs:
        yield (
            f"{both} were measured on other tokens of the same documents, calibrated on another "
            "text, or scored on other choices"
        )
