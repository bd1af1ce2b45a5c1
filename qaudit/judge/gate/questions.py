"""The questions of a policy: one for every rule, subject and scheme.

`@ships` is one subject at one scheme of each bit class; any other selector names subjects, each
under every scheme of its rule. A question has the columns of sums that answer it, or the reason
why there are none. A rule that matches no subject is a question without an answer: it must not
count as met.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from qaudit.core import statistics
from qaudit.core.statistics import Statistic
from qaudit.judge.gate.audits import SHIPS, GateInput, Pair
from qaudit.judge.table import Cell, Sums, Table, disagreements, divergences, losses
from qaudit.types import (
    FULL_PRECISION,
    NEEDS_BASELINE,
    OF_FIDELITY,
    OF_TASKS,
    Level,
    Metric,
    Policy,
    PolicyRule,
)

STATISTICS: dict[Metric, tuple[Statistic, Sums]] = {
    "relative_error": (statistics.excess, losses),
    "absolute_change": (statistics.change, losses),
    "loss_against_baseline": (statistics.change, losses),
    "error_against_baseline": (statistics.excess_difference, losses),
    "soup_against_members": (statistics.change, losses),
    "kl": (statistics.per_token, divergences),
    "kl_p999": (statistics.per_token, divergences),
    "top1": (statistics.per_token, disagreements),
}
_COMPARED: dict[Metric, str] = {
    "kl": "the KL divergence",
    "kl_p999": "the KL divergence of one token in a thousand",
    "top1": "the likeliest token",
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
    bit_class: str | None = None  # of the scheme

    @property
    def is_grouped(self) -> bool:
        return any(m.evidence.strata for m in self.table.draws(*self.own[0]))

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
            every = list(_of_rule(rule, audit, pair, policy.classes))
            yield from (replace(q, bit_class=audit.class_of.get(q.scheme or "")) for q in every)


def _of_rule(
    rule: PolicyRule, audit: GateInput, pair: Pair | None, classes: Mapping[str, Level]
) -> Iterator[Question]:
    others = tuple(selector for selector in rule.subjects if selector != SHIPS)
    measured = {*audit.class_of.values()}
    if rule.bits and classes and not measured & {*rule.bits}:
        return  # of a policy with classes, those that were not measured are checks of their own
    named = list(_of_subjects(replace(rule, subjects=others), audit, pair)) if others else []
    yield from named
    if SHIPS in rule.subjects:
        seen = {(question.subject, question.scheme) for question in named}
        ships = replace(rule, subjects=(SHIPS,))
        yield from _of_ships(ships, audit, pair, classes, seen)


def _of_ships(
    rule: PolicyRule,
    audit: GateInput,
    pair: Pair | None,
    classes: Mapping[str, Level],
    seen: Container[tuple[str, str | None]],
) -> Iterator[Question]:
    """Yield the questions about what ships; a class that was not measured has none.

    Where a policy names its classes, those without an answer are checks of their own.
    """
    cells = audit.shipped(rule, classes)
    if not cells and not classes:
        absent = f"rule `{rule.name}` matches nothing: nothing of its schemes or bits ships"
        yield Question(rule, audit.table, SHIPS, None, absent=absent, hint="add it to `--schemes`")
    if cells and rule.metric in NEEDS_BASELINE and pair is None:
        yield _without_baseline(rule, audit, SHIPS)
        return
    soups = {s.label for s in audit.subjects if s.kind == "soup"}
    for (label, scheme), split in cells.items():
        if (label, scheme) in seen or (
            rule.metric == "soup_against_members" and label not in soups
        ):
            continue
        yield _of_cell(rule, audit, pair, label, scheme, split)


def _without_baseline(rule: PolicyRule, audit: GateInput, label: str) -> Question:
    sentence = f"rule `{rule.name}` compares with a baseline, and none was given"
    hint = "give one: `--baseline`"
    return Question(rule, audit.table, label, None, absent=sentence, hint=hint)


def _of_subjects(rule: PolicyRule, audit: GateInput, pair: Pair | None) -> Iterator[Question]:
    splits = audit.labels(rule.subjects)
    soups = {s.label for s in audit.subjects if s.kind == "soup"}
    applies = soups if rule.metric == "soup_against_members" else splits
    schemes = audit.schemes(rule.schemes, rule.bits)
    label, absent, hint = ", ".join(rule.subjects), "", ""
    if not splits:
        absent = f"matches nothing: no subject matches {_quoted(rule.subjects)}"
        hint = "`@all` is every subject"
    elif not any(label in applies for label in splits):
        absent = f"matches nothing: no soup is among {_quoted(rule.subjects)}"
        hint = "add one with `--soup`"
    elif rule.metric in NEEDS_BASELINE and pair is None:
        yield _without_baseline(rule, audit, label)
        return
    elif not schemes:
        label = next(label for label in splits if label in applies)
        bits = f" of {' or '.join(rule.bits)} bits" if rule.bits else ""
        absent = f"matches nothing: none of {_quoted(rule.schemes)}{bits} was measured"
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
    for scheme in audit.schemes(rule.schemes, rule.bits):
        yield _of_cell(rule, audit, pair, label, scheme, split)


def _of_cell(
    rule: PolicyRule,
    audit: GateInput,
    pair: Pair | None,
    label: str,
    scheme: str,
    split: str | None,
) -> Question:
    if pair is not None and rule.metric in NEEDS_BASELINE:
        name = audit.class_of.get(scheme)
        return _against_baseline(rule, pair, (label, scheme), name, split)
    return question_of(rule, audit, label, scheme, split)


def question_of(
    rule: PolicyRule, audit: GateInput, label: str, scheme: str, split: str | None
) -> Question:
    """Return a question that the audit alone answers."""
    table = audit.table
    plain = Question(rule, table, label, scheme, split)
    absent, hint = _unmeasured(table, plain.own), _MEASURE
    unknown = any(m.evidence.fidelity is None for m in table.draws(label, scheme))
    if not absent and rule.metric in OF_FIDELITY and unknown:
        absent = f"{_COMPARED[rule.metric]} of `{label}` under {scheme} was not measured"
        hint = "scan again: this version measures it"
    if not absent and rule.strata and not plain.is_grouped:
        absent, hint = "the documents are not grouped", "scan with `--strata FIELD`"
    if not absent and rule.metric in OF_TASKS:
        measured = table.find(label, scheme)
        assert measured is not None
        if measured.evidence.tasks:
            return plain
        absent = f"no items of tasks were measured on `{label}` under {scheme}"
        hint = "scan with `--tasks` or `--choices`"
    if absent:
        return Question(rule, table, label, scheme, absent=absent, hint=hint)
    if rule.metric == "soup_against_members":
        return _against_members(rule, audit, label, scheme, split)
    cells = plain.own[:1] if rule.metric in OF_FIDELITY else plain.own
    return Question(rule, table, label, scheme, split, columns=(cells,))


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
    rule: PolicyRule, pair: Pair, ours: Cell, name: str | None, split: str | None
) -> Question:
    table, hint, (label, scheme) = pair.joint, _MEASURE, ours
    partner = pair.partner(rule, label, scheme, name)
    absent = _unmeasured(table, _with_full(label, scheme))
    if partner is None:
        absent, hint = (
            f"the baseline has nothing to compare `{label}` with",
            "scan the baseline anew",
        )
    elif not absent and not pair.baseline.table.draws(*partner):
        absent = f"`{partner[0]}` of the baseline was not measured under {partner[1]}"
    if absent or partner is None:
        return Question(rule, table, label, scheme, absent=absent, hint=hint)
    theirs = pair.prefix + partner[0], partner[1]
    cells: tuple[Cell, ...] = (ours, theirs)
    if rule.metric == "error_against_baseline":
        cells = (*_with_full(*ours), *_with_full(*theirs))
    against = partner[0] if partner[1] == scheme else " at ".join(partner)
    return Question(rule, table, label, scheme, split, (cells,), (against,))
