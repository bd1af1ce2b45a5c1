"""One check for each question: an interval against a margin, or why there is none.

Three outcomes by the interval: wholly within the margin passes, wholly beyond it fails, and any
other is inconclusive, with the number of documents that would decide. With fewer documents than
the policy requires, every interval is inconclusive. A loss that is not finite is a breach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from qaudit.core import statistics
from qaudit.judge.gate.held import Held
from qaudit.judge.gate.questions import Question
from qaudit.judge.gate.wording import HINTS, message
from qaudit.judge.pooling import Cell, estimated, settling
from qaudit.judge.scores import correct
from qaudit.judge.table import is_finite
from qaudit.types import CODE_OF, UNIT_OF, Check, Interval, Level, Policy

TOO_FEW = "QA026"


@dataclass(frozen=True)
class _Answer:
    """An interval, the subject it compares with, and a hint on what would decide it."""

    interval: Interval
    against: str | None
    deciding: Callable[[], str]


def answer(question: Question, policy: Policy, confidence: float) -> Check:
    """Answer a question with intervals of this confidence."""
    rule = question.rule
    check = Check(
        rule=CODE_OF[rule.metric],
        name=rule.name,
        level=rule.level,
        metric=rule.metric,
        subject=question.subject,
        scheme=question.scheme,
        outcome="missing",
        message=question.absent,
        hint=question.hint,
        margin=rule.margin,
        unit=UNIT_OF[rule.metric],
        line=rule.line,
    )
    if question.absent:
        return check
    check = replace(check, documents=_documents(question))
    if broken := next((cell for cell in question.own if not _finite(question, cell)), None):
        return replace(
            check,
            outcome="fail",
            message=f"the loss of `{broken[0]}` under {broken[1]} is not finite",
            hint="measure it in float32, and look for outliers in its weights",
        )
    found = _accuracy(question, confidence) if not question.columns else _loss(question, confidence)
    if isinstance(found, str):
        return replace(check, message=found)
    return _judged(check, question, found, policy)


def _judged(check: Check, question: Question, found: _Answer, policy: Policy) -> Check:
    outcome: Literal["pass", "fail", "inconclusive", "missing"]
    outcome = _outcome(found.interval, question.rule.margin, check.documents, policy)
    sentence = message(question, found.interval, found.against, check.documents)
    hint = HINTS[question.rule.metric] if outcome == "fail" else ""
    if outcome == "inconclusive":
        hint = _hint(check, question, found, policy)
    if outcome == "pass" and question.unmeasured:
        names = ", ".join(f"`{name}`" for name in question.unmeasured)
        outcome, hint = "missing", f"measure {names} of its members, too"
    return replace(
        check,
        outcome=outcome,
        message=sentence,
        hint=hint,
        interval=found.interval,
        against=found.against,
    )


def _hint(check: Check, question: Question, found: _Answer, policy: Policy) -> str:
    """Return what would decide; the policy's number where the interval alone is conclusive."""
    least = _least(policy)
    margin = question.rule.margin
    if check.documents < least and (found.interval.low > margin or found.interval.high <= margin):
        return f"the policy requires {least} documents"
    return found.deciding()


def _least(policy: Policy) -> int:
    return max(policy.minimum_documents, statistics.MINIMUM_DOCUMENTS)


def _outcome(
    found: Interval, margin: float, documents: int, policy: Policy
) -> Literal["pass", "fail", "inconclusive"]:
    if documents < _least(policy):
        return "inconclusive"
    if found.low > margin:
        return "fail"
    return "pass" if found.high <= margin else "inconclusive"


def _finite(question: Question, cell: Cell) -> bool:
    return all(is_finite(m) for m in question.table.draws(*cell))


def _documents(question: Question) -> int:
    if question.columns:
        return int(question.table.scored(question.split).sum())
    measured = question.table.find(*question.own[0])
    right = correct(measured.evidence) if measured else None
    return 0 if right is None else len(right)


# ------------------------------------------------------------------------------------- losses


def _loss(question: Question, confidence: float) -> _Answer | str:
    """Return the largest interval of the columns: all hold at once, so the largest does."""
    table, split = question.table, question.split
    found: list[tuple[Interval, str | None, tuple[Cell, ...]]] = []
    against: Sequence[str | None] = question.against or [None] * len(question.columns)
    for cells, other in zip(question.columns, against, strict=True):
        one = estimated(table, cells, question.statistic, split=split, confidence=confidence)
        if one is not None:
            found.append((one.interval, other, cells))
    if not found:
        return "what it is compared with has a loss that is not finite"
    whole = Interval(
        max(one.estimate for one, _, _ in found),
        max(one.low for one, _, _ in found),
        max(one.high for one, _, _ in found),
    )
    _, other, _ = max(found, key=lambda each: each[0].estimate)
    _, _, cells = max(found, key=lambda each: each[0].high)
    margin = question.rule.margin

    def deciding() -> str:
        return settling(table, cells, question.statistic, margin, split, confidence=confidence)

    return _Answer(whole, other, deciding)


# ----------------------------------------------------------------------------------- accuracy


def _accuracy(question: Question, confidence: float) -> _Answer | str:
    (scheme, full) = (question.table.find(*cell) for cell in question.own)
    assert scheme is not None
    assert full is not None
    right, right_full = correct(scheme.evidence), correct(full.evidence)
    if right is None or right_full is None:
        return f"no multiple-choice items were measured on `{question.subject}`"
    found = statistics.accuracy_drop(right, right_full, confidence)
    if found is None:
        if bool(right.all()):
            return _Answer(Interval(0.0, 0.0, 0.0), None, str)
        return f"`{question.subject}` answers all {len(right)} items in full precision"
    return _Answer(found, None, lambda: _settling_items(found, len(right), question.rule.margin))


def _settling_items(found: Interval, items: int, margin: float) -> str:
    needed = statistics.documents_to_settle(found, items, margin)
    if needed is None:
        return "more items may not decide it: the estimate is at the margin"
    return f"needs about {needed} items to decide; {items} were measured"


# ---------------------------------------------------------------------------------- documents


def too_few(policy: Policy, checks: Sequence[Check], held: Held) -> Iterator[Check]:
    """QA026: fewer documents than the policy requires; once for all checks."""
    least = _least(policy)
    judged = [c for c in checks if c.interval is not None and c.metric != "accuracy_drop"]
    few = [c for c in judged if c.documents < least]
    if not few:
        return
    counts = [c for c in few if c.level == "error"] or few
    fewest = min(c.documents for c in counts)
    level: Level = "error" if any(c.level == "error" for c in counts) else "warn"
    every = held.table.documents
    half = " that the pick was not chosen on" if fewest < every else ""
    needed = ceil(least * every / fewest) if fewest else least
    yield Check(
        rule=TOO_FEW,
        name="minimum_documents",
        level=level,
        metric="documents",
        subject=counts[0].subject,
        scheme=None,
        outcome="inconclusive",
        message=f"{fewest} documents{half} are fewer than the {least} that the policy requires",
        hint=f"evaluate on at least {needed} documents",
        documents=fewest,
        line=policy.line_of_documents,
    )
