"""The questions of a policy, one for every rule, subject and scheme.

`@ships` is one subject at one scheme of each bit class; any other selector names subjects, each
under every scheme of its rule. A rule that matches nothing, or what was not measured, is a question
without an answer: it must not count as met.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from qaudit.judge.gate.audits import PICK, SHIPS, GateInput, Pair
from qaudit.judge.quantities import (
    disagreements,
    reroutings,
    sure_flips,
    sure_tokens,
)
from qaudit.judge.table import Cell, Measurements, Sums, divergences, losses
from qaudit.types import (
    FULL_PRECISION,
    METRICS,
    MetricRecord,
    Policy,
    PolicyRule,
)

SUMS: Mapping[str, Sums] = {
    "losses": losses,
    "divergences": divergences,
    "disagreements": disagreements,
    "sure_flips": sure_flips,
    "reroutings": reroutings,
}
_ADD = "add it to `--schemes`"
_MEASURE = "scan with this scheme, too"


@dataclass(frozen=True, eq=False)
class Question:
    """One rule about one subject under one scheme.

    `absent` says why there is no answer, where there is none. Else the answer is the largest value
    over `columns`, each with the subject that it compares with; items and prompts are counted.
    """

    rule: PolicyRule
    table: Measurements
    subject: str
    scheme: str | None
    absent: str = ""
    hint: str = ""
    columns: tuple[tuple[str | None, tuple[Cell, ...]], ...] = ()
    unmeasured: tuple[str, ...] = ()  # members without a column
    at_once: int | None = None  # of how many it was chosen; None: it was named
    rivals: tuple[Cell, ...] = ()  # of what ships: the leader and its contenders

    @property
    def record(self) -> MetricRecord:
        return METRICS[self.rule.metric]

    @property
    def own(self) -> tuple[Cell, Cell]:
        return with_full((self.subject, self.scheme or FULL_PRECISION))

    @property
    def intervals(self) -> int:
        return 0 if self.absent else max(1, len(self.columns))


def with_full(cell: Cell) -> tuple[Cell, Cell]:
    return cell, (cell[0], FULL_PRECISION)


def questions(policy: Policy, audit: GateInput, pair: Pair | None) -> Iterator[Question]:
    """Yield the questions of every rule that is not off."""
    measured = {*audit.table.class_of.values()}
    for rule in policy.rules:
        if rule.level == "off" or (rule.bits and policy.classes and not measured & {*rule.bits}):
            continue  # of a policy with classes, what was not measured is a check of its own
        seen = set()
        if named := tuple(selector for selector in rule.subjects if selector != SHIPS):
            for question in _of_rule(replace(rule, subjects=named), policy, audit, pair):
                seen.add((question.subject, question.scheme))
                yield question
        if SHIPS in rule.subjects:
            for question in _of_rule(replace(rule, subjects=(SHIPS,)), policy, audit, pair):
                if (question.subject, question.scheme) not in seen:
                    yield question


def _of_rule(
    rule: PolicyRule, policy: Policy, audit: GateInput, pair: Pair | None
) -> Iterator[Question]:
    """Yield the questions about what ships, or about the subjects that a rule names."""
    record, named = METRICS[rule.metric], ", ".join(rule.subjects)
    soups = {s.label for s in audit.subjects if s.kind == "soup"}
    without_baseline = record.needs_baseline and pair is None
    no_baseline = named, "compares with a baseline, and none was given", "give one: `--baseline`"
    cells: list[tuple[str, str | None]] = []
    if rule.subjects == (SHIPS,):
        cells += audit.shipped(rule, policy.classes)
        nothing = "matches nothing: nothing of its schemes or bits ships"
        reasons = {
            (named, nothing, _ADD): not cells and not policy.classes,
            no_baseline: bool(cells) and without_baseline,
        }
    else:
        labels, schemes = audit.labels(rule.subjects), audit.schemes(rule.schemes, rule.bits)
        applies = [k for k in labels if record.against != "members" or k in soups]
        cells += [(k, s) for k in applies for s in ([None] if k in audit.skipped else schemes)]
        bits = f" of {' or '.join(rule.bits)} bits" if rule.bits else ""
        subjects, some, none = quoted(rule.subjects), quoted(rule.schemes), "matches nothing: no"
        reasons = {
            (named, f"{none} subject matches {subjects}", "`@all` is every subject"): not labels,
            (named, f"{none} soup is among {subjects}", "add one with `--soup`"): not applies,
            no_baseline: without_baseline,
            ("".join(applies[:1]), f"{none}ne of {some}{bits} was measured", _ADD): not schemes,
        }
    for (label, absent, hint), is_so in reasons.items():
        if is_so:
            absent = f"rule `{rule.name}` {absent}"
            yield Question(rule, audit.table, label, None, absent, hint)
            return
    for label, scheme in cells:
        if record.against == "members" and label not in soups:
            continue
        if scheme is None:
            absent = audit.not_measured(label)
            yield Question(rule, audit.table, label, None, absent, "scan it again")
        else:
            yield of_cell(rule, audit, pair, (label, scheme))


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def of_cell(rule: PolicyRule, audit: GateInput, pair: Pair | None, cell: Cell) -> Question:
    """Return the question about a cell, with of how many it was chosen."""
    if pair is not None and METRICS[rule.metric].needs_baseline:
        question = _against_baseline(rule, audit, pair, cell)
    else:
        question = plain_question(rule, audit, cell)
    if not {PICK, SHIPS} & {*rule.subjects}:
        return question
    at_once, rivals = audit.chosen_among(*cell)
    return replace(question, at_once=at_once, rivals=rivals)


def plain_question(rule: PolicyRule, audit: GateInput, cell: Cell) -> Question:
    """Return the question about a cell of one audit."""
    table, record, (label, scheme) = audit.table, METRICS[rule.metric], cell
    if absence := _absence(rule, table, with_full(cell)):
        return Question(rule, table, *cell, *absence)
    if record.against == "members":
        soup = next(s for s in audit.subjects if s.label == label)
        names = {s.first: s.label for s in table.subjects if s.kind == "checkpoint"}
        members = dict.fromkeys(names.get(c, c.label) for c, _ in soup.members)
        columns = tuple((m, (cell, (m, scheme))) for m in members if table.draws(m, scheme))
        if not columns:
            absent = f"no member of `{label}` was measured under {scheme}"
            return Question(rule, table, *cell, absent, "measure its members, too")
        missing = tuple(m for m in members if not table.draws(m, scheme))
        return Question(rule, table, *cell, columns=columns, unmeasured=missing)
    if record.of_tasks or record.of_rollouts:
        return Question(rule, table, *cell)
    own = (cell,) if record.of_fidelity else with_full(cell)
    return Question(rule, table, *cell, columns=((None, own),))


def _absence(
    rule: PolicyRule, table: Measurements, own: tuple[Cell, Cell]
) -> tuple[str, str] | None:
    """Return why there is nothing to judge, and what would measure it; None where there is."""
    record, (label, scheme) = METRICS[rule.metric], own[0]
    if absent := _unmeasured(table, own):
        return absent, _MEASURE
    evidence, full = (table.draws(*cell)[0].evidence for cell in own)
    if record.of_fidelity and np.isnan(SUMS[record.sums](evidence)).any():
        hint = "scan again"
        if record.sums == "reroutings":
            hint = "only models with experts have it, unless `--set routing=reference` replays it"
        return f"{record.compared} of `{label}` under {scheme} was not measured", hint
    if record.sums == "sure_flips" and not sure_tokens(evidence)[table.scored()].any():
        absent = f"full precision of `{label}` gives no token of these documents at least 0.5"
        return absent, "measure more documents, or text that the model is surer of: `--evaluation`"
    if rule.strata and not any(m.evidence.strata for m in table.draws(*own[0])):
        return "the documents are not grouped", "scan with `--set strata=FIELD`"
    if record.of_tasks and not evidence.tasks:
        absent = f"no items of tasks were measured on `{label}` under {scheme}"
        return (
            absent,
            "scan with `--tasks` or `--set choices=FILE`, or `qaudit import` answers of both",
        )
    if record.of_rollouts and not (evidence.rollouts and full.rollouts):
        absent = f"no rollouts were scored by `{label}` under {scheme}"
        return absent, "scan with `--set rollouts=FOLDER`, a folder that `qaudit rollouts` writes"
    return None


def _unmeasured(table: Measurements, cells: tuple[Cell, ...]) -> str:
    absent = (f"`{cell[0]}` was not measured under {cell[1]}" for cell in cells
              if not table.draws(*cell))  # fmt: skip
    return next(absent, "")


def _against_baseline(rule: PolicyRule, audit: GateInput, pair: Pair, ours: Cell) -> Question:
    partner = pair.partner(rule, *ours, audit.table.class_of.get(ours[1]))
    absent, hint = _unmeasured(pair.joint, with_full(ours)), _MEASURE
    if partner is None:
        absent = f"the baseline has nothing to compare `{ours[0]}` with"
        hint = "scan the baseline anew"
    elif not absent and not pair.baseline.table.draws(*partner):
        absent = f"`{partner[0]}` of the baseline was not measured under {partner[1]}"
    if absent or partner is None:
        return Question(rule, pair.joint, *ours, absent, hint)
    cells: tuple[Cell, ...] = (ours, theirs := pair.cell(partner))
    if METRICS[rule.metric].statistic == "excess_difference":
        cells = (*with_full(ours), *with_full(theirs))
    against = partner[0] if partner[1] == ours[1] else " at ".join(partner)
    return Question(rule, pair.joint, *ours, columns=((against, cells),))
