"""The questions of a policy: one for every rule, subject and scheme.

A question has the columns of sums that answer it, or the reason why there are none. A rule that
matches no subject is a question without an answer: it must not count as met.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from qaudit.core import statistics
from qaudit.core.statistics import Statistic
from qaudit.judge.gate.audits import GateInput, Pair
from qaudit.judge.scores import correct
from qaudit.judge.table import Cell, Table
from qaudit.types import FULL_PRECISION, NEEDS_BASELINE, Metric, Policy, PolicyRule

STATISTICS: dict[Metric, Statistic] = {
    "relative_error": statistics.excess,
    "absolute_change": statistics.change,
    "loss_against_baseline": statistics.change,
    "error_against_baseline": statistics.excess_difference,
    "soup_against_members": statistics.change,
}
_MEASURE = "scan with this scheme, too"


@dataclass(frozen=True, eq=False)
class Question:
    """One rule about one subject under one scheme.

    The answer is the largest value over `columns`: one quantity, or one for each member of a
    soup. Accuracy has no columns; it is counted.
    """

    rule: PolicyRule
    table: Table
    subject: str
    scheme: str | None
    split: str | None = None
    columns: tuple[tuple[Cell, ...], ...] = ()
    against: tuple[str, ...] = ()  # the subject that each column compares with
    unmeasured: tuple[str, ...] = ()  # members without a column
    absent: str = ""  # why there is no answer
    hint: str = ""

    @property
    def statistic(self) -> Statistic:
        return STATISTICS[self.rule.metric]

    @property
    def own(self) -> tuple[Cell, ...]:
        return _with_full(self.subject, self.scheme or FULL_PRECISION)

    @property
    def intervals(self) -> int:
        return 0 if self.absent else max(1, len(self.columns))


def _with_full(subject: str, scheme: str) -> tuple[Cell, Cell]:
    return (subject, scheme), (subject, FULL_PRECISION)


def questions(policy: Policy, audit: GateInput, pair: Pair | None) -> Iterator[Question]:
    """Yield the questions of every rule that is not off."""
    for rule in policy.rules:
        if rule.level != "off":
            yield from _of_rule(rule, audit, pair)


def _of_rule(rule: PolicyRule, audit: GateInput, pair: Pair | None) -> Iterator[Question]:
    splits = audit.labels(rule.subjects)
    soups = {s.label for s in audit.subjects if s.kind == "soup"}
    applies = soups if rule.metric == "soup_against_members" else splits
    schemes = audit.schemes(rule.schemes)
    label, absent, hint = ", ".join(rule.subjects), "", ""
    if not splits:
        absent = f"matches nothing: no subject matches {_quoted(rule.subjects)}"
        hint = "`@all` is every subject"
    elif not any(label in applies for label in splits):
        absent = f"matches nothing: no soup is among {_quoted(rule.subjects)}"
        hint = "add one with `--soup`"
    elif rule.metric in NEEDS_BASELINE and pair is None:
        absent, hint = "compares with a baseline, and none was given", "give one: `--baseline`"
    elif not schemes:
        label = next(label for label in splits if label in applies)
        absent = f"matches nothing: none of {_quoted(rule.schemes)} was measured"
        hint = "add it to `--schemes`"
    if absent:
        sentence = f"rule `{rule.name}` {absent}"
        yield Question(rule, audit.table, label, None, absent=sentence, hint=hint)
        return
    for label, split in splits.items():
        if label in applies:
            yield from _of_subject(rule, audit, pair, label, split)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _of_subject(
    rule: PolicyRule, audit: GateInput, pair: Pair | None, label: str, split: str | None
) -> Iterator[Question]:
    if label in audit.skipped:
        absent, hint = audit.not_measured(label), "scan it again"
        yield Question(rule, audit.table, label, None, absent=absent, hint=hint)
        return
    for scheme in audit.schemes(rule.schemes):
        if pair is not None and rule.metric in NEEDS_BASELINE:
            yield _against_baseline(rule, pair, label, scheme, split)
        else:
            yield question_of(rule, audit, label, scheme, split)


def question_of(
    rule: PolicyRule, audit: GateInput, label: str, scheme: str, split: str | None
) -> Question:
    """Return a question that the audit alone answers."""
    table = audit.table
    plain = Question(rule, table, label, scheme, split)
    absent, hint = _unmeasured(table, plain.own), _MEASURE
    if not absent and rule.metric == "accuracy_drop":
        measured = table.find(label, scheme)
        assert measured is not None
        if correct(measured.evidence) is not None:
            return plain
        absent = f"no multiple-choice items were measured on `{label}` under {scheme}"
        hint = "scan with `--choices`"
    if absent:
        return Question(rule, table, label, scheme, absent=absent, hint=hint)
    if rule.metric == "soup_against_members":
        return _against_members(rule, audit, label, scheme, split)
    return Question(rule, table, label, scheme, split, columns=(plain.own,))


def _unmeasured(table: Table, cells: tuple[Cell, ...]) -> str:
    for subject, scheme in cells:
        if not table.draws(subject, scheme):
            return f"`{subject}` was not measured under {scheme}"
    return ""


def _against_members(
    rule: PolicyRule, audit: GateInput, label: str, scheme: str, split: str | None
) -> Question:
    table = audit.table
    soup = next(s for s in audit.subjects if s.label == label)
    names = {s.first: s.label for s in table.subjects if s.kind == "checkpoint"}
    members = dict.fromkeys(names.get(c, c.label) for c, _ in soup.members)
    there = tuple(m for m in members if table.draws(m, scheme))
    if not there:
        absent = f"no member of `{label}` was measured under {scheme}"
        return Question(rule, table, label, scheme, absent=absent, hint="measure its members, too")
    columns = tuple(((label, scheme), (member, scheme)) for member in there)
    missing = tuple(m for m in members if m not in there)
    return Question(rule, table, label, scheme, split, columns, there, missing)


def _against_baseline(
    rule: PolicyRule, pair: Pair, label: str, scheme: str, split: str | None
) -> Question:
    table, partner, hint = pair.joint, pair.partner(rule, label), _MEASURE
    absent = _unmeasured(table, _with_full(label, scheme))
    if partner is None:
        absent, hint = (
            f"the baseline has nothing to compare `{label}` with",
            "scan the baseline anew",
        )
    elif not absent and not pair.baseline.table.draws(partner, scheme):
        absent = f"`{partner}` of the baseline was not measured under {scheme}"
    if absent or partner is None:
        return Question(rule, table, label, scheme, absent=absent, hint=hint)
    theirs = pair.prefix + partner
    cells: tuple[Cell, ...] = ((label, scheme), (theirs, scheme))
    if rule.metric == "error_against_baseline":
        cells = (*_with_full(label, scheme), *_with_full(theirs, scheme))
    return Question(rule, table, label, scheme, split, (cells,), (partner,))
