"""The questions of a policy: one for every rule, subject and scheme.

A question has the columns of sums that answer it, or the reason why there are none. A rule that
matches no subject is a question without an answer: it must not count as met.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qaudit.core import statistics
from qaudit.core.statistics import Statistic
from qaudit.judge.gate.baseline import Pair
from qaudit.judge.gate.held import Held
from qaudit.judge.pooling import Cell
from qaudit.judge.scores import correct
from qaudit.judge.table import Table
from qaudit.types import FULL_PRECISION, NEEDS_BASELINE, Metric, Policy, PolicyRule

STATISTICS: dict[Metric, Statistic] = {
    "relative_error": statistics.excess,
    "absolute_change": statistics.change,
    "loss_against_baseline": statistics.change,
    "error_against_baseline": statistics.excess_difference,
    "soup_against_members": statistics.change,
}


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
        """The statistic of a column."""
        return STATISTICS[self.rule.metric]

    @property
    def own(self) -> tuple[Cell, ...]:
        """The subject's own cells."""
        scheme = self.scheme or FULL_PRECISION
        return (self.subject, scheme), (self.subject, FULL_PRECISION)

    @property
    def intervals(self) -> int:
        """The number of intervals that answer it."""
        return 0 if self.absent else max(1, len(self.columns))


def questions(policy: Policy, held: Held, pair: Pair | None) -> Iterator[Question]:
    """Yield the questions of every rule that is not off."""
    for rule in policy.rules:
        if rule.level != "off":
            yield from _of_rule(rule, held, pair)


def _of_rule(rule: PolicyRule, held: Held, pair: Pair | None) -> Iterator[Question]:
    named = held.chosen(rule.subjects)
    if not named:
        yield _unmatched(rule, held, "no subject matches", "`@all` is every subject")
        return
    if rule.metric == "soup_against_members":
        soups = {s.label for s in held.subjects if s.kind == "soup"}
        named = {label: split for label, split in named.items() if label in soups}
        if not named:
            yield _unmatched(rule, held, "no soup is among", "add one with `--soup`")
            return
    if rule.metric in NEEDS_BASELINE and pair is None:
        label = ", ".join(rule.subjects)
        absent = f"rule `{rule.name}` compares with a baseline, and none was given"
        yield Question(rule, held.table, label, None, absent=absent, hint="give one: `--baseline`")
        return
    schemes = held.schemes(rule.schemes)
    if not schemes:
        globs = ", ".join(f"`{glob}`" for glob in rule.schemes)
        absent = f"rule `{rule.name}` matches nothing: none of {globs} was measured"
        label = next(iter(named))
        yield Question(rule, held.table, label, None, absent=absent, hint="add it to `--schemes`")
        return
    for label, split in named.items():
        yield from _of_subject(rule, held, pair, label, split, schemes)


def _unmatched(rule: PolicyRule, held: Held, what: str, hint: str) -> Question:
    names = ", ".join(f"`{name}`" for name in rule.subjects)
    label = ", ".join(rule.subjects)
    absent = f"rule `{rule.name}` matches nothing: {what} {names}"
    return Question(rule, held.table, label, None, absent=absent, hint=hint)


def _of_subject(
    rule: PolicyRule,
    held: Held,
    pair: Pair | None,
    label: str,
    split: str | None,
    schemes: list[str],
) -> Iterator[Question]:
    if label in held.skipped:
        absent = f"`{label}` was planned and not measured: {held.skipped[label]}"
        yield Question(rule, held.table, label, None, absent=absent, hint="scan it again")
        return
    for scheme in schemes:
        if rule.metric in NEEDS_BASELINE and pair is not None:
            yield _against_baseline(rule, pair, label, scheme, split)
        else:
            yield question_of(rule, held, label, scheme, split)


def question_of(
    rule: PolicyRule, held: Held, label: str, scheme: str, split: str | None
) -> Question:
    """Return a question that the audit alone answers."""
    table = held.table
    plain = Question(rule, table, label, scheme, split)
    absent = _unmeasured(table, plain.own)
    if absent:
        return Question(rule, table, label, scheme, absent=absent, hint=_MEASURE)
    if rule.metric == "accuracy_drop":
        measured = table.find(label, scheme)
        assert measured is not None
        if correct(measured.evidence) is None:
            absent = f"no multiple-choice items were measured on `{label}` under {scheme}"
            return Question(rule, table, label, scheme, absent=absent, hint="scan with `--choices`")
        return plain
    if rule.metric == "soup_against_members":
        return _against_members(rule, held, label, scheme, split)
    return Question(rule, table, label, scheme, split, columns=(plain.own,))


_MEASURE = "scan with this scheme, too"


def _unmeasured(table: Table, cells: tuple[Cell, ...]) -> str:
    for subject, scheme in cells:
        if not table.draws(subject, scheme):
            return f"`{subject}` was not measured under {scheme}"
    return ""


def _against_members(
    rule: PolicyRule, held: Held, label: str, scheme: str, split: str | None
) -> Question:
    table = held.table
    soup = next(s for s in held.subjects if s.label == label)
    names = {s.first: s.label for s in table.subjects if s.kind == "checkpoint"}
    members = dict.fromkeys(names.get(c, c.label) for c, _ in soup.members)
    there = [m for m in members if table.draws(m, scheme)]
    missing = tuple(m for m in members if m not in there)
    if not there:
        absent = f"no member of `{label}` was measured under {scheme}"
        return Question(rule, table, label, scheme, absent=absent, hint="measure its members, too")
    columns = tuple(((label, scheme), (member, scheme)) for member in there)
    return Question(rule, table, label, scheme, split, columns, tuple(there), missing)


def _against_baseline(
    rule: PolicyRule, pair: Pair, label: str, scheme: str, split: str | None
) -> Question:
    table, partner = pair.joint, pair.partner(rule, label)
    if partner is None:
        absent = f"the baseline has nothing to compare `{label}` with"
        return Question(rule, table, label, scheme, absent=absent, hint="scan the baseline anew")
    theirs = pair.name(partner)
    absent = _unmeasured(table, ((label, scheme), (label, FULL_PRECISION)))
    if not absent and not pair.baseline.table.draws(partner, scheme):
        absent = f"`{partner}` of the baseline was not measured under {scheme}"
    if absent:
        return Question(rule, table, label, scheme, absent=absent, hint=_MEASURE)
    cells: tuple[Cell, ...] = ((label, scheme), (theirs, scheme))
    if rule.metric == "error_against_baseline":
        cells = (
            (label, scheme),
            (label, FULL_PRECISION),
            (theirs, scheme),
            (theirs, FULL_PRECISION),
        )
    return Question(rule, table, label, scheme, split, (cells,), (partner,))
