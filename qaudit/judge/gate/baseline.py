"""The previous release as a baseline: whether it compares, and with which of its subjects.

A quantized loss is compared on the same documents, token by token, so that everything which
moves it must be the same: a difference in text, cutting, precision or tokenizer is refused by
name. Of the baseline, a subject is compared with the one of the same label if the rule is about
that there, too, and otherwise with what the baseline's own evidence picks: `@pick` is compared
with the pick of then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from qaudit.errors import UsageError
from qaudit.judge.gate.held import Held
from qaudit.judge.table import Table
from qaudit.types import PolicyRule

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


def comparable(held: Held, baseline: Held) -> None:
    """Refuse a baseline that was measured with another protocol, by what differs."""
    if held.dtype != baseline.dtype:
        raise _differ(held, baseline, f"in {held.dtype}", f"in {baseline.dtype}")
    for key, text in _PROTOCOL.items():
        ours, theirs = held.protocol.get(key), baseline.protocol.get(key)
        if ours != theirs:
            with_ours, with_theirs = (f"with {text.format(_shown(v))}" for v in (ours, theirs))
            raise _differ(held, baseline, with_ours, with_theirs)
    _same_documents(held, baseline)
    ours, theirs = (side.protocol.get("corpus_sha256") for side in (held, baseline))
    if ours and theirs and ours != theirs:
        raise UsageError(
            f"`{held.name}` and `{baseline.name}` were measured on other tokens of the same "
            "documents, calibrated on another text, or scored on other choices",
            hint=_ALIKE,
        )


def _differ(held: Held, baseline: Held, ours: str, theirs: str) -> UsageError:
    sentence = f"`{held.name}` was measured {ours} and `{baseline.name}` {theirs}"
    return UsageError(sentence, hint=_ALIKE)


def _shown(value: object) -> object:
    return "no limit" if value is None else str(value).lower() if value in (True, False) else value


def _same_documents(held: Held, baseline: Held) -> None:
    ours, theirs = (side.table.measurements[0].evidence for side in (held, baseline))
    if ours.document_sha256 != theirs.document_sha256:
        common = len(set(ours.document_sha256) & set(theirs.document_sha256))
        raise UsageError(
            f"`{held.name}` was measured on {len(ours.document_sha256)} documents and "
            f"`{baseline.name}` on {len(theirs.document_sha256)}, of which {common} are the same"
            + (", in another order" if common == len(ours.document_sha256) else ""),
            hint=_ALIKE,
        )
    if not np.array_equal(ours.tokens, theirs.tokens):
        raise UsageError(
            f"`{held.name}` and `{baseline.name}` count other tokens in the same documents: "
            "they have different tokenizers",
            hint="a loss per token means something else then: compare `bits_per_byte` in both "
            "`audit.json`, or name a baseline with this tokenizer",
        )
    if ours.split != theirs.split:
        sentence = f"`{held.name}` and `{baseline.name}` choose on other documents"
        raise UsageError(sentence, hint=_ALIKE)


@dataclass(frozen=True, eq=False)
class Pair:
    """An audit and its baseline, and one table of both."""

    held: Held
    baseline: Held
    joint: Table
    prefix: str

    @classmethod
    def of(cls, held: Held, baseline: Held) -> Pair:
        """Join two audits that compare; labels of the baseline get a prefix."""
        labels = [s.label for s in held.table.subjects]
        prefix = "baseline: "
        while any(label.startswith(prefix) for label in labels):
            prefix = f"the {prefix}"
        theirs = baseline.table
        joint = Table.of(
            (*held.table.subjects, *(replace(s, label=prefix + s.label) for s in theirs.subjects)),
            (
                *held.table.measurements,
                *(replace(m, subject=prefix + m.subject) for m in theirs.measurements),
            ),
            held.table.confidence,
        )
        return cls(held, baseline, joint, prefix)

    def name(self, label: str) -> str:
        """Return what a subject of the baseline is called in the joint table."""
        return self.prefix + label

    def partner(self, rule: PolicyRule, label: str) -> str | None:
        """Return the subject of the baseline that a subject is compared with."""
        if label in self.baseline.chosen(rule.subjects) and label not in self.baseline.skipped:
            return label
        return self.baseline.pick.subject if self.baseline.pick else None
