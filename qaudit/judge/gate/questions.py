"""The questions of a policy: one for every rule, subject and scheme.

`@ships` is one subject at one scheme of each bit class; any other selector names subjects, each
under every scheme of its rule. A question has the columns of sums that answer it, or the reason
why there are none. A rule that matches no subject is a question without an answer: it must not
count as met.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from qaudit.judge.fidelity import disagreements, reroutings, sure_flips, sure_tokens
from qaudit.judge.gate.audits import PICK, SHIPS, GateInput, Pair
from qaudit.judge.table import Cell, Measurements, Sums, divergences, losses
from qaudit.types import FULL_PRECISION, METRICS, Level, MetricRecord, Policy, PolicyRule

SUMS: Mapping[str, Sums] = {
    "losses": losses,
    "divergences": divergences,
    "disagreements": disagreements,
    "sure_flips": sure_flips,
    "reroutings": reroutings,
}
_MEASURE = "scan with this scheme, too"


@dataclass(frozen=True, eq=False)
class Question:
    """One rule about one subject under one scheme.

    The answer is the largest value over `columns`: one quantity, or one for each member of a
    soup. Accuracy has no columns; it is counted.
    """

    rule: PolicyRule
    table: Measurements
    subject: str
    scheme: str | None
    columns: tuple[tuple[Cell, ...], ...] = ()
    against: tuple[str, ...] = ()  # the subject that each column compares with
    unmeasured: tuple[str, ...] = ()  # members without a column
    absent: str = ""  # why there is no answer
    hint: str = ""
    bit_class: str | None = None  # of the scheme
    at_once: int | None = None  # of how many it was chosen; None: it was named
    rivals: tuple[Cell, ...] = ()  # of what ships: the leader and its contenders

    @property
    def record(self) -> MetricRecord:
        return METRICS[self.rule.metric]

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
    asking = Asking(audit, pair, policy.classes)
    for rule in policy.rules:
        if rule.level != "off":
            yield from asking.of_rule(rule)


@dataclass(frozen=True, eq=False)
class Asking:
    """What rules are asked of: an audit, its baseline, and the classes of the policy."""

    audit: GateInput
    pair: Pair | None
    classes: Mapping[str, Level]

    def of_rule(self, rule: PolicyRule) -> Iterator[Question]:
        subjects = tuple(selector for selector in rule.subjects if selector != SHIPS)
        if rule.bits and self.classes and not {*self.audit.class_of.values()} & {*rule.bits}:
            return  # of a policy with classes, those that were not measured are checks of their own
        named = list(self._of_subjects(replace(rule, subjects=subjects))) if subjects else []
        yield from named
        if SHIPS in rule.subjects:
            seen = {(question.subject, question.scheme) for question in named}
            yield from self._of_ships(replace(rule, subjects=(SHIPS,)), seen)

    def _of_ships(
        self, rule: PolicyRule, seen: Container[tuple[str, str | None]]
    ) -> Iterator[Question]:
        """Yield the questions about what ships; a class that was not measured has none."""
        cells = self.audit.shipped(rule, self.classes)
        if not cells and not self.classes:
            absent = f"rule `{rule.name}` matches nothing: nothing of its schemes or bits ships"
            yield self._without_answer(rule, SHIPS, absent, "add it to `--schemes`")
        if cells and METRICS[rule.metric].needs_baseline and self.pair is None:
            yield self._without_baseline(rule, SHIPS)
            return
        for label, scheme in cells:
            is_soup = label in self._soups or METRICS[rule.metric].against != "members"
            if is_soup and (label, scheme) not in seen:
                yield self.of_cell(rule, label, scheme)

    def _of_subjects(self, rule: PolicyRule) -> Iterator[Question]:
        labels = self.audit.labels(rule.subjects)
        applies = self._soups if METRICS[rule.metric].against == "members" else {*labels}
        schemes = self.audit.schemes(rule.schemes, rule.bits)
        label, absent, hint = ", ".join(rule.subjects), "", ""
        if not labels:
            absent = f"matches nothing: no subject matches {_quoted(rule.subjects)}"
            hint = "`@all` is every subject"
        elif not any(label in applies for label in labels):
            absent = f"matches nothing: no soup is among {_quoted(rule.subjects)}"
            hint = "add one with `--soup`"
        elif METRICS[rule.metric].needs_baseline and self.pair is None:
            yield self._without_baseline(rule, label)
            return
        elif not schemes:
            label = next(label for label in labels if label in applies)
            bits = f" of {' or '.join(rule.bits)} bits" if rule.bits else ""
            absent = f"matches nothing: none of {_quoted(rule.schemes)}{bits} was measured"
            hint = "add it to `--schemes`"
        if absent:
            yield self._without_answer(rule, label, f"rule `{rule.name}` {absent}", hint)
            return
        for label in labels:
            if label not in applies:
                continue
            if label in self.audit.skipped:
                absent = self.audit.not_measured(label)
                yield self._without_answer(rule, label, absent, "scan it again")
            else:
                yield from (self.of_cell(rule, label, scheme) for scheme in schemes)

    def of_cell(self, rule: PolicyRule, label: str, scheme: str) -> Question:
        name = self.audit.class_of.get(scheme)
        if self.pair is not None and METRICS[rule.metric].needs_baseline:
            question = _against_baseline(rule, self.pair, (label, scheme), name)
        else:
            question = question_of(rule, self.audit, label, scheme)
        at_once, rivals = None, tuple[Cell, ...]()
        if {PICK, SHIPS} & {*rule.subjects}:
            at_once, rivals = self.audit.chosen_among(label, scheme)
        return replace(question, bit_class=name, at_once=at_once, rivals=rivals)

    @property
    def _soups(self) -> set[str]:
        return {s.label for s in self.audit.subjects if s.kind == "soup"}

    def _without_baseline(self, rule: PolicyRule, label: str) -> Question:
        sentence = f"rule `{rule.name}` compares with a baseline, and none was given"
        return self._without_answer(rule, label, sentence, "give one: `--baseline`")

    def _without_answer(self, rule: PolicyRule, label: str, absent: str, hint: str) -> Question:
        return Question(rule, self.audit.table, label, None, absent=absent, hint=hint)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def question_of(rule: PolicyRule, audit: GateInput, label: str, scheme: str) -> Question:
    table = audit.table
    plain = Question(rule, table, label, scheme)
    absent, hint = _unmeasured(table, plain.own), _MEASURE
    if not absent and plain.record.of_fidelity:
        absent, hint = _uncompared(plain, table)
    if not absent and rule.strata and not plain.is_grouped:
        absent, hint = "the documents are not grouped", "scan with `--set strata=FIELD`"
    if not absent and plain.record.of_tasks:
        measured = table.find(label, scheme)
        assert measured is not None
        if measured.evidence.tasks:
            return plain
        absent = f"no items of tasks were measured on `{label}` under {scheme}"
        hint = "scan with `--tasks` or `--set choices=FILE`, or `qaudit import` answers of both"
    if not absent and plain.record.of_rollouts:
        streams = (table.find(*cell) for cell in plain.own)
        if all(stream.evidence.rollouts for stream in streams if stream is not None):
            return plain
        absent = f"no rollouts were scored by `{label}` under {scheme}"
        hint = "scan with `--set rollouts=FOLDER`, a folder that `qaudit rollouts` writes"
    if absent:
        return Question(rule, table, label, scheme, absent=absent, hint=hint)
    if METRICS[rule.metric].against == "members":
        return _against_members(rule, audit, label, scheme)
    cells = plain.own[:1] if plain.record.of_fidelity else plain.own
    return Question(rule, table, label, scheme, columns=(cells,))


def _uncompared(question: Question, table: Measurements) -> tuple[str, str]:
    """Return why a stream was not compared with full precision, and a hint; '' where it was."""
    label, scheme, record = question.subject, question.scheme or FULL_PRECISION, question.record
    measured = table.find(label, scheme)
    assert measured is not None
    if np.isnan(SUMS[record.sums](measured.evidence)).any():
        hint = "scan again"
        if record.sums == "reroutings":
            hint = "only models with experts have it, unless `--set routing=reference` replays it"
        return f"{record.compared} of `{label}` under {scheme} was not measured", hint
    scored = table.scored()
    if record.sums == "sure_flips" and not sure_tokens(measured.evidence)[scored].any():
        return (
            f"full precision of `{label}` gives no token of these documents at least 0.5",
            "measure more documents, or text that the model is surer of: `--evaluation`",
        )
    return "", ""


def _unmeasured(table: Measurements, cells: tuple[Cell, ...]) -> str:
    for subject, scheme in cells:
        if not table.draws(subject, scheme):
            return f"`{subject}` was not measured under {scheme}"
    return ""


def _against_members(rule: PolicyRule, audit: GateInput, label: str, scheme: str) -> Question:
    table = audit.table
    soup = next(s for s in audit.subjects if s.label == label)
    names = {s.first: s.label for s in table.subjects if s.kind == "checkpoint"}
    members = dict.fromkeys(names.get(c, c.label) for c, _ in soup.members)
    measured = tuple(m for m in members if table.draws(m, scheme))
    if not measured:
        absent = f"no member of `{label}` was measured under {scheme}"
        return Question(rule, table, label, scheme, absent=absent, hint="measure its members, too")
    columns = tuple(((label, scheme), (member, scheme)) for member in measured)
    missing = tuple(m for m in members if m not in measured)
    return Question(rule, table, label, scheme, columns, measured, missing)


def _against_baseline(rule: PolicyRule, pair: Pair, ours: Cell, name: str | None) -> Question:
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
    if METRICS[rule.metric].statistic == "excess_difference":
        cells = (*_with_full(*ours), *_with_full(*theirs))
    against = partner[0] if partner[1] == scheme else " at ".join(partner)
    return Question(rule, table, label, scheme, (cells,), (against,))
