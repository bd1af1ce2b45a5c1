"""The audit that a policy is applied to, and the previous release as its baseline.

Selectors choose the subjects of a rule among those that were *planned*: where the last checkpoint
could not be measured, `@last` is still that one and not the one before it.

A quantized loss is compared on the same documents, token by token, so that everything which
moves it must be the same: a difference in text, cutting, precision or tokenizer is refused by
name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np

from qaudit.errors import UsageError
from qaudit.judge.pick import choose
from qaudit.judge.table import Table
from qaudit.types import FULL_PRECISION, HELD_OUT, AuditRecord, Pick, PolicyRule, Subject

PICK = "@pick"


@dataclass(frozen=True, eq=False)
class GateInput:
    """An audit's measurements and protocol, and the subjects that were planned."""

    table: Table
    name: str = "audit"
    planned: tuple[Subject, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)  # label -> why
    protocol: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""
    searched: frozenset[str] = frozenset()  # labels of soups that a search made

    @classmethod
    def of(cls, audit: AuditRecord, table: Table, name: str) -> GateInput:
        measured = {m.subject for m in table.measurements}
        missing = {s.label for s in audit.plan.subjects} - measured
        return cls(
            table=table,
            name=name,
            planned=audit.plan.subjects,
            skipped={s.subject: s.reason for s in audit.skipped if s.subject in missing},
            protocol={"context": audit.plan.context, **audit.protocol},
            dtype=audit.plan.dtype,
            searched=frozenset(s.label for s in audit.plan.subjects if s.is_search),
        )

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """The subjects that were planned or measured, in the order of the plan.

        A search for a soup may end without one: it was planned, and there is no soup to judge.
        """
        known = {s.label: s for s in self.table.subjects}
        every = {s.label: known.get(s.label, s) for s in (*self.planned, *self.table.subjects)}
        return tuple(s for s in every.values() if s.label in known or s.label in self.skipped)

    @cached_property
    def pick(self) -> Pick | None:
        return choose(self.table)

    @cached_property
    def pick_split(self) -> str | None:
        """The documents to judge the pick on: those it was not chosen on, if it was chosen."""
        contested = self.pick is not None and self.pick.runner_up is not None
        return HELD_OUT if contested and self.table.is_split else None

    def labels(self, selectors: Iterable[str]) -> dict[str, str | None]:
        """Return labels, each with the split to judge it on."""
        splits: dict[str, str | None] = {}
        for selector in selectors:
            for label in self._labels(selector):
                split = self.pick_split if selector == PICK and self.pick else None
                # A subject that is also named otherwise is judged on all documents.
                splits[label] = split if label not in splits else (splits[label] and split)
                if label in self.searched and self.table.is_split:
                    splits[label] = HELD_OUT
        order = {s.label: k for k, s in enumerate(self.subjects)}
        return dict(sorted(splits.items(), key=lambda pair: order[pair[0]]))

    def _labels(self, selector: str) -> list[str]:
        if selector == PICK:
            # Where no loss is finite there is no pick, and every subject is a breach.
            return [self.pick.subject] if self.pick else [s.label for s in self.table.subjects]
        if selector in ("@checkpoints", "@last"):
            checkpoints = [s.label for s in self.subjects if s.kind == "checkpoint"]
            return checkpoints if selector == "@checkpoints" else checkpoints[-1:]
        if selector == "@soups":
            return [s.label for s in self.subjects if s.kind == "soup"]
        return [s.label for s in self.subjects if selector == "@all" or matches(s.label, selector)]

    def schemes(self, globs: Iterable[str]) -> list[str]:
        """Return the measured schemes that some glob matches; full precision only by its name."""
        globs = tuple(globs)
        known = self.table.quantized_schemes
        matching = [name for name in known if any(matches(name, glob) for glob in globs)]
        return [FULL_PRECISION, *matching] if FULL_PRECISION in globs else matching

    def not_measured(self, label: str) -> str:
        return f"`{label}` was planned and not measured: {self.skipped[label]}"


def matches(name: str, glob: str) -> bool:
    """Whether a name equals a glob, or matches it."""
    return name == glob or fnmatchcase(name, glob)


# ------------------------------------------------------------------------------- the baseline


@dataclass(frozen=True, eq=False)
class Pair:
    """An audit's baseline, and one table of both, in which labels of the baseline have a prefix."""

    baseline: GateInput
    joint: Table
    prefix: str

    @classmethod
    def of(cls, audit: GateInput, baseline: GateInput) -> Pair:
        _refuse_other_protocol(audit, baseline)
        prefix = "baseline: "
        while any(s.label.startswith(prefix) for s in audit.table.subjects):
            prefix = f"the {prefix}"
        subjects = (replace(s, label=prefix + s.label) for s in baseline.table.subjects)
        measured = (replace(m, subject=prefix + m.subject) for m in baseline.table.measurements)
        joint = Table.of(
            (*audit.table.subjects, *subjects),
            (*audit.table.measurements, *measured),
            audit.table.confidence,
        )
        return cls(baseline, joint, prefix)

    def partner(self, rule: PolicyRule, label: str) -> str | None:
        """Return the subject of the baseline that a subject is compared with.

        It is the one of the same label if the rule is about that there, too, and otherwise what
        the baseline's own evidence picks: `@pick` is compared with the pick of then.
        """
        if label in self.baseline.labels(rule.subjects) and label not in self.baseline.skipped:
            return label
        return self.baseline.pick.subject if self.baseline.pick else None


_PROTOCOL = {
    "context": "a context of {} tokens",
    "stride": "a stride of {} tokens",
    "bos": "`bos={}`",
    "packed": "`packed={}`",
    "document_tokens": "documents of at most {} tokens",
    "calibration_documents": "{} calibration documents",
    "calibration_seed": "calibration seed {}",
}
_ALIKE = "measure both with the same protocol and text; such numbers do not compare"


def _refuse_other_protocol(audit: GateInput, baseline: GateInput) -> None:
    sides = (audit, baseline)
    if audit.dtype != baseline.dtype:
        raise _differ(audit, baseline, [f"in {side.dtype}" for side in sides])
    for key, text in _PROTOCOL.items():
        values = [side.protocol.get(key) for side in sides]
        if values[0] != values[1]:
            raise _differ(
                audit, baseline, [f"with {text.format(_value_text(value))}" for value in values]
            )
    _refuse_other_documents(audit, baseline)
    ours, theirs = (side.protocol.get("corpus_sha256") for side in sides)
    if ours and theirs and ours != theirs:
        raise UsageError(
            f"`{audit.name}` and `{baseline.name}` were measured on other tokens of the same "
            "documents, calibrated on another text, or scored on other choices",
            hint=_ALIKE,
        )


def _differ(audit: GateInput, baseline: GateInput, how: list[str]) -> UsageError:
    sentence = f"`{audit.name}` was measured {how[0]} and `{baseline.name}` {how[1]}"
    return UsageError(sentence, hint=_ALIKE)


def _value_text(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return "no limit" if value is None else value


def _refuse_other_documents(audit: GateInput, baseline: GateInput) -> None:
    ours, theirs = (side.table.measurements[0].evidence for side in (audit, baseline))
    if ours.document_sha256 != theirs.document_sha256:
        common = len(set(ours.document_sha256) & set(theirs.document_sha256))
        raise UsageError(
            f"`{audit.name}` was measured on {len(ours.document_sha256)} documents and "
            f"`{baseline.name}` on {len(theirs.document_sha256)}, of which {common} are the same"
            + (", in another order" if common == len(ours.document_sha256) else ""),
            hint=_ALIKE,
        )
    if not np.array_equal(ours.tokens, theirs.tokens):
        raise UsageError(
            f"`{audit.name}` and `{baseline.name}` count other tokens in the same documents: "
            "they have different tokenizers",
            hint="a loss per token means something else then: compare `bits_per_byte` in both "
            "`audit.json`, or name a baseline with this tokenizer",
        )
    if ours.split != theirs.split:
        sentence = f"`{audit.name}` and `{baseline.name}` choose on other documents"
        raise UsageError(sentence, hint=_ALIKE)
