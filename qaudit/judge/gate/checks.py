"""The questions of a policy, one for every rule, subject and scheme, and the check of each.

`@ships` is one subject at one scheme of each bit class; any other selector names subjects, each
under every scheme of its rule. A rule that matches nothing, or what was not measured, is a question
without an answer: it must not count as met.

A check holds an interval against a margin. Three outcomes: wholly within the margin passes, wholly
beyond it fails, and any other is inconclusive, with the number of documents that would decide.
Fewer documents than the policy requires keep a check from passing, and hide no failure. A loss that
is not finite is a breach.

The end of an interval that has to be within the margin pays for choosing, where what is judged was
chosen on these documents; the other end, by which a check fails, does not (`Levels`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from qaudit.core import items as paired
from qaudit.core import statistics
from qaudit.core.statistics import Statistic
from qaudit.judge.gate.audits import PICK, SHIPS, GateInput, Pair
from qaudit.judge.scores import largest, strata_of
from qaudit.judge.table import (
    SUMS,
    Cell,
    Deciding,
    Measurements,
    columns_of,
    deciding,
    estimated,
    interval_of,
    is_finite,
    settling,
    sided,
    sure_tokens,
)
from qaudit.judge.tasks import MEAN, QUANTITIES, marked, tasks_of
from qaudit.types import (
    FULL_PRECISION,
    METRICS,
    Check,
    Interval,
    MetricRecord,
    Policy,
    PolicyRule,
    bound_of,
    in_unit,
)

FEW = 4
"""Contenders, up to which the one that ships is bounded by its own documents alone."""

_ADD = "add it to `--schemes`"
_MEASURE = "scan with this scheme, too"
_MORE_PROMPTS = "write rollouts of more prompts with `qaudit rollouts`"


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
        named = tuple(selector for selector in rule.subjects if selector != SHIPS)
        seen = set()
        for subjects in (named, (SHIPS,) if SHIPS in rule.subjects else ()):
            part = replace(rule, subjects=subjects)
            for question in _of_rule(part, policy, audit, pair) if subjects else ():
                if (question.subject, question.scheme) not in seen:
                    seen.add((question.subject, question.scheme))
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
    question = partial(Question, rule, table, label, scheme)
    if absent := _unmeasured(table, with_full(cell)):
        return question(absent, _MEASURE)
    evidence, full = (table.draws(*each)[0].evidence for each in with_full(cell))
    if record.of_fidelity and np.isnan(SUMS[record.sums](evidence)).any():
        hint = "scan again"
        if record.sums == "reroutings":
            hint = "only models with experts have it, unless `--set routing=reference` replays it"
        return question(f"{record.compared} of `{label}` under {scheme} was not measured", hint)
    if record.sums == "sure_flips" and not sure_tokens(evidence)[table.scored()].any():
        absent = f"full precision of `{label}` gives no token of these documents at least 0.5"
        hint = "measure more documents, or text that the model is surer of: `--evaluation`"
        return question(absent, hint)
    if rule.strata and not any(m.evidence.strata for m in table.draws(*cell)):
        return question("the documents are not grouped", "scan with `--set strata=FIELD`")
    if record.of_tasks and not evidence.tasks:
        hint = "scan with `--tasks` or `--set choices=FILE`, or `qaudit import` answers of both"
        return question(f"no items of tasks were measured on `{label}` under {scheme}", hint)
    if record.of_rollouts and not (evidence.rollouts and full.rollouts):
        hint = "scan with `--set rollouts=FOLDER`, a folder that `qaudit rollouts` writes"
        return question(f"no rollouts were scored by `{label}` under {scheme}", hint)
    if record.of_tasks or record.of_rollouts:
        return question()
    if record.against != "members":
        return question(columns=((None, (cell,) if record.of_fidelity else with_full(cell)),))
    soup = next(s for s in audit.subjects if s.label == label)
    names = {s.first: s.label for s in table.subjects if s.kind == "checkpoint"}
    members = dict.fromkeys(names.get(c, c.label) for c, _ in soup.members)
    columns = tuple((m, (cell, (m, scheme))) for m in members if table.draws(m, scheme))
    if not columns:
        absent = f"no member of `{label}` was measured under {scheme}"
        return question(absent, "measure its members, too")
    missing = tuple(m for m in members if not table.draws(m, scheme))
    return question(columns=columns, unmeasured=missing)


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


# ------------------------------------------------------------------------------------ its check


class Levels(NamedTuple):
    """The confidence of the lower and of the upper end of an interval."""

    low: float
    high: float


def levels_of(policy: Policy, question: Question, at_once: int) -> Levels:
    """Return the confidences of both ends of an interval.

    What was named is judged with all that was named, at both ends. What was chosen pays for
    choosing at the end that has to be within the margin.
    """
    if question.at_once is None:
        level = statistics.simultaneous(policy.confidence, at_once)
        return Levels(level, level)
    paid = statistics.simultaneous(policy.confidence, question.at_once)
    if question.record.at_least:
        return Levels(paid, policy.confidence)
    return Levels(policy.confidence, paid)


_Answer = tuple[Interval, str | None, Callable[[], Deciding]]
"""An interval, the subject or part that it is of, and what would decide it."""


def answer(question: Question, policy: Policy, levels: Levels) -> Check:
    rule, record = question.rule, question.record
    check = partial(
        Check,
        rule=record.code,
        name=rule.name,
        level=rule.level,
        metric=rule.metric,
        subject=question.subject,
        scheme=question.scheme,
        margin=rule.margin,
        unit=record.unit,
        line=rule.line,
        bit_class=question.table.class_of.get(question.scheme or ""),
    )
    if question.absent:
        return check(outcome="missing", message=question.absent, hint=question.hint)
    documents = _documents(question)
    for cell in question.own:
        if not all(map(is_finite, question.table.draws(*cell))):
            message = f"the loss of `{cell[0]}` under {cell[1]} is not finite"
            hint = "measure it in float32, and look for outliers in its weights"
            return check(outcome="fail", message=message, hint=hint, documents=documents)
    ways = {
        _of_rollouts: record.of_rollouts,
        _of_tasks: record.of_tasks,
        _worst: rule.strata is not None,
        _tail: record.quantile is not None,
    }
    result = next((way for way, is_so in ways.items() if is_so), _mean)(question, levels)
    if isinstance(result, str):
        return check(outcome="missing", message=result, documents=documents)
    interval, against, _ = result
    names = {"scheme": question.scheme, "subject": question.subject, "against": against}
    message = record.sentence.format(**names, change=in_unit(interval, record.unit))
    message += f" in `{against}`, the worst stratum" if rule.strata is not None else ""
    message += f" in `{against}`, the worst task" if rule.tasks is not None else ""
    outcome, decided_by = _outcome(question, result, documents, policy.minimum_documents)
    return check(
        outcome=outcome,
        message=f"{message}, and the margin is {bound_of(rule.margin, record.unit)}",
        hint=decided_by.hint,
        interval=interval,
        documents=documents,
        against=against,
        needed_documents=decided_by.documents,
    )


def _outcome(
    question: Question, result: _Answer, documents: int, least: int
) -> tuple[Literal["pass", "fail", "inconclusive", "missing"], Deciding]:
    """Return the outcome by the interval, and a hint: what would decide, or what to do."""
    (interval, _, needed), record, margin = result, question.record, question.rule.margin
    passes, fails = record.reaches(interval, margin)
    if fails:
        if question.rule.level == "warn":  # the class may ship all the same
            accept = f"accept it, or set `level: error` for the rule `{question.rule.name}`"
            return "fail", Deciding(accept)
        if SHIPS in question.rule.subjects and "qaudit pick" in record.hint:
            better = "nothing that was measured does better: add schemes or checkpoints"
            return "fail", Deciding(better)
        return "fail", Deciding(record.hint)
    is_unbounded = record.quantile is not None and not math.isfinite(interval.high)
    if is_unbounded and interval.estimate <= margin:
        # Tokens are too few to bound a tail, and nothing beyond the margin was seen.
        seen = f"{interval.estimate:.2g} was seen, the margin is {bound_of(margin, record.unit)}"
        unbounded = Deciding(f"too few tokens to bound the rarest; {seen}")
        return "pass" if question.rule.level == "warn" else "inconclusive", unbounded
    if documents < least:
        # The policy's number where the interval alone is conclusive.
        required = Deciding(f"the policy requires {least} documents", least)
        if record.of_rollouts:
            required = Deciding(f"the policy requires {least} prompts: {_MORE_PROMPTS}")
        decided_by = required if passes else needed()
        most = max(decided_by.documents or 0, required.documents or 0)
        return "inconclusive", replace(decided_by, documents=most)
    if not passes:
        return "inconclusive", needed()
    if question.unmeasured:
        return "missing", Deciding(f"measure {quoted(question.unmeasured)} of its members, too")
    return "pass", Deciding("")


def _documents(question: Question) -> int:
    """Return how many documents judge, or prompts, or items."""
    if question.columns:
        return question.table.documents
    measured, full = (question.table.find(*cell) for cell in question.own)
    if question.record.of_rollouts and measured is not None and measured.evidence.rollouts:
        return len(np.unique(measured.evidence.rollouts.prompt))
    return sum(len(pair.full_N) for pair in marked(measured, full, MEAN) or ())


def _worst(question: Question, levels: Levels) -> _Answer | str:
    """Return the interval of the worst stratum; those of all strata hold at once."""
    table, record, cell = question.table, question.record, question.own[0]
    strata = strata_of(table.draws(*cell)[0])
    columns = columns_of(table, question.columns[0][1], SUMS[record.sums])
    if columns is None or not strata:
        return f"no stratum of `{cell[0]}` has a `{question.rule.metric}` that is finite"
    make = partial(statistics.interval, statistic=getattr(statistics, record.statistic))
    low, high = (statistics.simultaneous(level, len(strata)) for level in levels)
    results: dict[str, Interval] = {}
    for name, inside in strata.items():
        sums = [column[inside] for column in columns]
        at_low = make(sums, confidence=low)
        results[name] = replace(at_low, high=make(sums, confidence=high).high)
    worst = max(results, key=lambda name: results[name].estimate)
    documents = int(strata[worst].sum())
    hint = f"the worst stratum has {documents} documents: evaluate on more of its kind"
    return largest(results.values()), worst, lambda: Deciding(hint)


def _tail(question: Question, levels: Levels) -> _Answer:
    """Return the quantile over the tokens, documents being the clusters."""
    table, share = question.table, question.record.quantile
    fidelity = table.draws(*question.own[0])[0].evidence.fidelity
    assert fidelity is not None and share is not None
    counts = fidelity.kl_counts[table.scored()]
    whole = sided(*(statistics.quantile_interval(counts, share, level) for level in levels))
    assert whole is not None

    def needed() -> Deciding:
        if not math.isfinite(whole.high):
            return Deciding("too few tokens for the upper bound: evaluate on more documents")
        spread = statistics.spread_from(whole, table.documents, max(levels))
        error, margin = spread.standard_error, question.rule.margin
        count = statistics.documents_to_decide(whole, error, table.documents, margin)
        return deciding(count, table.documents)

    return (whole, None, needed)


def _mean(question: Question, levels: Levels) -> _Answer | str:
    """Return the largest interval of the columns: all hold at once, so the largest does."""
    table, record, margin = question.table, question.record, question.rule.margin
    statistic: Statistic = getattr(statistics, record.statistic)
    sums = SUMS[record.sums]

    def interval(cells: tuple[Cell, ...]) -> Interval | None:
        make = partial(interval_of, table, cells, statistic, sums=sums)
        return sided(*(make(confidence=level) for level in levels))

    every = [(interval(cells), against, cells) for against, cells in question.columns]
    results = [(found, against, cells) for found, against, cells in every if found is not None]
    if not results:
        return "what it is compared with has a loss that is not finite"
    whole = largest(found for found, _, _ in results)
    _, against, _ = max(results, key=lambda each: each[0].estimate)
    _, _, widest = max(results, key=lambda each: each[0].high)
    if record.against is None and len(question.rivals) > FEW:
        # The pick of many may look quiet by luck: the upper end reaches as far as the lower
        # quartile of those of all contenders.
        width = len(question.columns[0][1])
        others = [interval(with_full(rival)[:width]) for rival in question.rivals]
        reaches = sorted(each.high - each.estimate for each in others if each is not None)
        if reaches:
            least = reaches[min((len(question.rivals) - 1) // 4, len(reaches) - 1)]
            whole = replace(whole, high=max(whole.high, whole.estimate + least))
    return (whole, against, lambda: settling(table, widest, statistic, margin, whole, sums))


def _of_rollouts(question: Question, levels: Levels) -> _Answer | str:
    label, record = question.subject, question.record
    stream, full = (question.table.draws(*cell)[0].evidence.rollouts for cell in question.own)
    assert stream is not None
    assert full is not None
    subject = next(s for s in question.table.subjects if s.label == label)
    low, high = (QUANTITIES[record.statistic](stream, full, subject, level) for level in levels)
    if isinstance(low, str) or isinstance(high, str):
        return f"{record.compared} of `{label}` was not measured: {low}"
    whole = Interval(low.estimate, low.low, high.high)
    return (whole, None, lambda: Deciding(_MORE_PROMPTS))


def _of_tasks(question: Question, levels: Levels) -> _Answer | str:
    """Return the interval of the mean over tasks, or of the worst: those of all hold at once."""
    measured, full = (question.table.find(*cell) for cell in question.own)
    rule, label = question.rule, question.subject
    tasks = tuple(tasks_of(measured)) if rule.tasks else (MEAN,)
    levels = Levels(*(statistics.simultaneous(level, len(tasks)) for level in levels))
    results: dict[str, tuple[Interval, int]] = {}
    for task in tasks:
        pairs = marked(measured, full, task)
        if pairs is None:
            return f"no items of tasks were measured on `{label}`"
        statistic: Callable[..., Interval | None] = getattr(paired, question.record.statistic)
        interval = sided(*(statistic(pairs, level) for level in levels))
        if interval is None:
            return f"`{label}` answers all items of `{task}` in full precision"
        results[task] = interval, sum(len(pair.full_N) for pair in pairs)
    worst = max(results, key=lambda task: results[task][0].estimate)
    whole, items = largest(interval for interval, _ in results.values()), results[worst][1]

    def needed() -> Deciding:
        count = statistics.items_to_detect(whole, items, rule.margin, max(levels))
        if count is None:
            return Deciding("more items may not decide it: the estimate is at the margin")
        imported = any(task.imported for task in tasks_of(measured).values())
        more = "import more" if imported else "raise `--set task_items=N`"
        return Deciding(f"needs about {count} items to decide; {items} were measured: {more}")

    return (whole, worst if rule.tasks else None, needed)


# ------------------------------------------------------------------------- against the baseline


def mark_known(
    check: Check, question: Question, pair: Pair, policy: Policy, levels: Levels
) -> Check:
    """Mark a breach that the baseline has, too, at the level that the policy gives it.

    It is known where the baseline breaches the same rule at the same margin and the new one is
    not significantly worse: accepting a breach once is no licence to get worse.
    """
    if question.record.needs_baseline or check.scheme is None:
        return check  # it compares with the baseline already: such a breach is new
    partner = pair.partner(question.rule, check.subject, check.scheme, check.bit_class)
    if partner is None:
        return check
    before = answer(plain_question(question.rule, pair.baseline, partner), policy, levels)
    if before.outcome != "fail" or _is_worse(check, before, question, pair, partner, levels.low):
        return check
    return replace(
        check,
        known=True,
        level=policy.known if check.level == "error" else check.level,
        against=check.against or partner[0],
        message=f"{check.message}; so it was with `{partner[0]}` of the baseline",
    )


def _is_worse(
    check: Check, before: Check, question: Question, pair: Pair, partner: Cell, confidence: float
) -> bool:
    """Whether a breach is significantly worse than before; a loss that is not finite is worst."""
    if check.interval is None or before.interval is None:
        return before.interval is not None
    record = question.record
    if record.worse is None or question.rule.strata is not None:
        if record.at_least:
            return before.interval.low > check.interval.high
        return check.interval.low > before.interval.high
    cells: tuple[Cell, ...] = (question.own[0], pair.cell(partner))
    if record.worse.endswith("_difference"):
        cells = tuple(each for cell in cells for each in with_full(cell))
    statistic: Statistic = getattr(statistics, record.worse)
    sums = SUMS[record.sums]
    change = estimated(pair.joint, cells, statistic, confidence=confidence, sums=sums)
    return change is None or change.interval.low > 0
