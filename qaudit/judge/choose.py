"""What may ship of each bit class: the leader, the contenders that may be as good, and the pick.

All documents choose and judge, and the bound pays for choosing. The leader of a class has the
lowest quantized loss. Contenders are the rivals whose paired difference of loss to the leader does
not exclude zero, with all compared at once (Bonferroni); they and the leader are counted
(`at_once`), and the upper end of an interval of what ships is at 1 - (1 - c) / (2 at_once). The
lower end stays at (1 - c) / 2. On fewer than ten documents nothing is ruled out, and all candidates
count.

Of the contenders of the leader's subject that hold to the policy the one with the fewest bits
ships, then the one with the lowest KL divergence: KL divergence is to each subject's own full
precision and must not choose between subjects. A mixture of bits is a candidate where it takes no
more bits than the largest file of one width that was measured in its class. A bound of few or lucky
documents may be short by luck, so that of the pick is at least the lower quartile of those of all
contenders (`judge.gate`). `bits@2%`, `kl` and `loss@SCHEME` choose among all candidates, and all
count.

A soup that a search made was the best of several means on these documents: they count, too.

An objective says what "best" means:

loss              the lowest quantized loss
loss@awq-3bit     the same at one scheme
kl                the lowest KL divergence to full precision, among the schemes of the subject that
                  has the lowest quantized loss
bits@1%           the fewest bits per weight whose loss stays within 1 % of the best loss in
                  full precision, over all subjects
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from qaudit.core import statistics
from qaudit.core.scheme import most_bits_first
from qaudit.errors import UsageError
from qaudit.judge.table import (
    Cell,
    Measurements,
    Sums,
    divergences,
    interval_of,
    is_finite,
    losses,
    sided,
)
from qaudit.settings import SEARCHED_AT
from qaudit.support.keys import nearest
from qaudit.types import FULL_PRECISION, NEAR_BASELINE, ClassVerdict, Interval, Measurement, Pick

EXAMPLES = ("loss", f"loss@{SEARCHED_AT}", "kl", "bits@1%", "pareto")


@dataclass(frozen=True)
class Objective:
    """One of the forms above."""

    kind: Literal["loss", "kl", "bits"] = "loss"
    scheme: str | None = None
    margin: float | None = None

    def __str__(self) -> str:
        if self.kind == "bits":
            return f"bits@{100 * (self.margin or 0):g}%"
        return f"{self.kind}@{self.scheme}" if self.scheme else self.kind


LOSS = Objective()


def parse_objective(text: str) -> Objective:
    kind, at, rest = text.strip().partition("@")
    if kind == "loss" and (rest or not at):
        return Objective("loss", scheme=rest or None)
    if kind == "kl" and not at:
        return Objective("kl")
    if kind != "bits":
        raise UsageError(f"there is no objective `{text}`", hint=nearest(text, EXAMPLES))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", rest)
    margin = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < margin < 1:
        message = f"`{text}` has no margin between 0 and 100 %"
        raise UsageError(message, hint="write `bits@1%`")
    return Objective("bits", margin=margin)


UNQUANTIZED = "fp"
"""The class of full precision, which only an objective that names it chooses."""

MAIN = "4"
"""The class of the pick where it was measured; else that of the most bits."""

SAME_BITS = 0.05
"""Bits per weight within which schemes cost the same: their scales differ by as much."""

NO_SEARCH: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class ClassChoice:
    """The candidates of a class, and in which order they may ship."""

    bit_class: str
    title: str
    ranked: tuple[Measurement, ...] = ()  # by what the objective asks for, the best first
    contenders: tuple[Measurement, ...] = ()  # rivals of the first that may be as good
    preferred: tuple[Measurement, ...] = ()  # what may ship in place of the first, in this order
    at_once: int = 1
    by_divergence: bool = False
    reference: Measurement | None = None  # in full precision, which a margin is counted from
    changes: tuple[str, ...] = ()
    picked: Measurement | None = None  # by a policy

    @property
    def leader(self) -> Measurement | None:
        return self.ranked[0] if self.ranked else None

    @property
    def ships(self) -> Measurement | None:
        """What ships: by a policy, or what is preferred without one."""
        return self.picked or next(iter(self.preferred), None)

    @property
    def candidates(self) -> tuple[Measurement, ...]:
        """What may ship, in order, by some policy."""
        return (*self.preferred, *self.ranked[:1])

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The leader and its contenders."""
        return tuple(m.cell for m in (*self.ranked[:1], *self.contenders))


def classes_of(table: Measurements) -> tuple[str, ...]:
    names = {m.bit_class for m in table.measurements if m.scheme != FULL_PRECISION}
    return tuple(sorted(names, key=most_bits_first))


def choices(
    table: Measurements,
    objective: Objective = LOSS,
    classes: Sequence[str] = (),
    searched: Mapping[str, int] = NO_SEARCH,
) -> tuple[ClassChoice, ...]:
    """Choose in each bit class, by default in all that were measured.

    An objective that compares classes chooses once. `searched` has how many means a search tried
    for each soup that it made.
    """
    if objective.kind == "bits":
        fewest = _cheapest(table, objective.margin or 0.0, classes, searched)
        return (fewest,) if fewest else ()
    names = classes or classes_of(table)
    if objective.scheme == FULL_PRECISION:
        names = (UNQUANTIZED,)
    elif objective.scheme is not None:
        of_scheme = (m for m in table.measurements if m.scheme == objective.scheme)
        names = tuple(dict.fromkeys(m.bit_class for m in of_scheme))
    return tuple(_choice(table, objective, name, searched) for name in names)


def _choice(
    table: Measurements, objective: Objective, name: str, searched: Mapping[str, int]
) -> ClassChoice:
    every = candidates(table, name, objective.scheme)
    widest = max((m.bits_per_weight for m in every if not m.mixture), default=np.inf)
    larger = [m for m in every if m.mixture and m.bits_per_weight > widest]
    too_large = (
        f"`{m.subject}` at {m.scheme} is no candidate: its {m.bits_per_weight:.2f} bits per weight "
        f"are more than {widest:.2f}, the most of a file of one width that was measured"
        for m in larger
    )
    ranked = [m for m in every if m not in larger]
    bits = f"{name} bits" if name.isdecimal() else name
    where = objective.scheme or (bits if name != UNQUANTIZED else "full precision")
    title = f"lowest quantized loss at {where}"
    count, by_divergence = len(ranked), objective.kind == "kl"
    if by_divergence:
        title = f"lowest KL divergence at {where}, of the subject with the lowest quantized loss"
        same = [m for m in ranked if m.subject == ranked[0].subject and m.evidence.fidelity]
        ranked = _ranked(same, divergences)
    if not ranked:
        return ClassChoice(name, title)
    leader, *rivals = ranked
    divergence = partial(_divergence, table)
    few = table.documents < statistics.MINIMUM_DOCUMENTS
    level = statistics.simultaneous(table.confidence, len(rivals))
    contenders = tuple(
        rival
        for rival in rivals
        if few
        or _lead(table, leader, rival, level, by_divergence=by_divergence).high >= 0
        or (by_divergence and max(divergence(leader), divergence(rival)) < NEAR_BASELINE)
    )  # nearer to full precision than that KL divergence does not rank
    of_loss = objective.kind == "loss" and objective.scheme is None
    same_subject = (m for m in contenders if m.subject == leader.subject)
    preferred = sorted((leader, *same_subject), key=lambda m: (m.bits_per_weight, divergence(m)))
    at_once = count if few or not of_loss else 1 + len(contenders)
    return ClassChoice(
        bit_class=name,
        title=title,
        ranked=tuple(ranked),
        contenders=contenders,
        preferred=tuple(preferred) if of_loss and not few else (leader,),
        at_once=at_once + _tried(searched, (leader, *contenders)),
        by_divergence=by_divergence,
        changes=tuple(too_large),
    )


def _tried(searched: Mapping[str, int], measured: Sequence[Measurement]) -> int:
    """Return how many means searches tried beside those that were measured."""
    labels = {m.subject for m in measured}
    return sum(max(0, trials - 1) for label, trials in searched.items() if label in labels)


def candidates(table: Measurements, name: str, scheme: str | None = None) -> list[Measurement]:
    """Return every candidate of a class whose loss is finite, the lowest first, without twins.

    Equal losses keep the order of the series, and then that of names, so that the order of
    `--schemes` changes nothing.
    """
    order = {subject.label: k for k, subject in enumerate(table.subjects)}
    every = [
        m
        for m in table.first_draws.measurements
        if m.bit_class == name and scheme in (None, m.scheme) and is_finite(m)
    ]
    every.sort(key=lambda m: (order[m.subject], m.scheme))
    return _ranked(every)


def _ranked(cells: Sequence[Measurement], sums: Sums = losses) -> list[Measurement]:
    """Order cells; leave out those with the losses of an earlier one, to the bit."""
    distinct: list[Measurement] = []
    for measured in sorted(cells, key=lambda m: float(sums(m.evidence).sum())):
        nll_sum = measured.evidence.nll_sum
        if not any(np.array_equal(nll_sum, other.evidence.nll_sum) for other in distinct):
            distinct.append(measured)
    return distinct


def _lead(
    table: Measurements, a: Measurement, b: Measurement, level: float, *, by_divergence: bool
) -> Interval:
    sums = divergences if by_divergence else losses
    lead = interval_of(table, [a.cell, b.cell], statistics.change, confidence=level, sums=sums)
    return lead or statistics.UNKNOWN


def _divergence(table: Measurements, measured: Measurement) -> float:
    result = interval_of(table, [measured.cell], statistics.per_token, sums=divergences)
    return np.inf if result is None else result.estimate


def _cheapest(
    table: Measurements, margin: float, classes: Sequence[str], searched: Mapping[str, int]
) -> ClassChoice | None:
    """Choose the fewest bits whose loss stays within a margin; None where nothing does."""
    full = candidates(table, UNQUANTIZED)
    if not full:
        return None
    reference, names = full[0], classes or (*classes_of(table), UNQUANTIZED)
    every = [m for name in names for m in candidates(table, name)]
    at_once = len(every) + _tried(searched, every)
    excess = {id(m): _excess(table, m, reference, at_once) for m in every}
    remaining, within = [m for m in every if excess[id(m)].high <= margin], list[Measurement]()
    while remaining:  # by bits, and by loss among those of one price
        price = min(m.bits_per_weight for m in remaining) + SAME_BITS
        of_price = (m for m in remaining if m.bits_per_weight <= price)
        within += sorted(of_price, key=lambda m: excess[id(m)].estimate)
        remaining = [m for m in remaining if m.bits_per_weight > price]
    if not within:
        return None
    cheaper = [m for m in every if m.bits_per_weight < within[0].bits_per_weight - SAME_BITS]
    nearest = min(cheaper, key=lambda m: excess[id(m)].high, default=None)
    changes = []
    if nearest is not None and np.isfinite(excess[id(nearest)].high):
        changes.append(
            f"within {100 * excess[id(nearest)].high:.2g} % it would be `{nearest.subject}` at "
            f"{nearest.scheme} ({nearest.bits_per_weight:.2f} bits)"
        )
    return ClassChoice(
        bit_class=within[0].bit_class or UNQUANTIZED,
        title=f"fewest bits per weight within {100 * margin:g} % of the loss of "
        f"`{reference.subject}` in full precision",
        ranked=tuple(within),
        preferred=(within[0],),
        at_once=at_once,
        reference=reference,
        changes=tuple(changes),
    )


def _excess(
    table: Measurements, measured: Measurement, reference: Measurement, at_once: int
) -> Interval:
    """Return the loss over that of a reference in full precision, as a fraction."""
    cells = [measured.cell, (reference.subject, FULL_PRECISION)]
    return paid(table, cells, statistics.excess, at_once) or statistics.UNKNOWN


def paid(
    table: Measurements,
    cells: Sequence[Cell],
    statistic: statistics.Statistic,
    at_once: int,
    sums: Sums = losses,
) -> Interval | None:
    """Return a quantity whose upper end pays for the choice among so many."""
    levels = table.confidence, statistics.simultaneous(table.confidence, at_once)
    return sided(
        *(interval_of(table, cells, statistic, confidence=level, sums=sums) for level in levels)
    )


# ----------------------------------------------------------------------------- what is said of it


def class_verdict(table: Measurements, choice: ClassChoice) -> ClassVerdict:
    """Return a class with what ships of it, before a policy is applied."""
    measured = choice.ships
    if measured is None:
        return ClassVerdict(choice.bit_class, "off", "undecided", None, None, choice.title)
    rivals = [m for m in choice.ranked if m is not measured]
    second, cell = (rivals[0] if rivals else None), measured.cell
    lead = None
    if choice.reference is not None:
        lead = _excess(table, measured, choice.reference, choice.at_once)
    elif second is not None:
        lead = _lead(table, measured, second, table.confidence, by_divergence=choice.by_divergence)
    relative, may_be = None, (choice.leader, *choice.contenders)
    if measured.scheme != FULL_PRECISION:
        pair = [cell, (measured.subject, FULL_PRECISION)]
        relative = paid(table, pair, statistics.excess, choice.at_once)
    return ClassVerdict(
        bit_class=choice.bit_class,
        level="off",
        status="undecided",
        subject=measured.subject,
        scheme=measured.scheme,
        objective=choice.title,
        ce=interval_of(table, [cell], statistics.per_token),
        relative_error=relative,
        kl=paid(table, [cell], statistics.per_token, choice.at_once, divergences),
        runner_up=second.subject if second else None,
        runner_up_scheme=second.scheme if second else None,
        lead=lead,
        reference=choice.reference.subject if choice.reference else None,
        contenders=tuple(f"{m.subject} at {m.scheme}" for m in rivals if m in may_be),
        at_once=choice.at_once,
        changes=(*choice.changes, *_changes(table, choice, measured)),
        documents=table.documents,
        bits_per_weight=measured.bits_per_weight,
        nbytes=measured.nbytes,
    )


def _changes(table: Measurements, choice: ClassChoice, best: Measurement) -> Iterator[str]:
    """Yield what the choice would be if something were left out."""
    if choice.by_divergence or choice.reference is not None:
        return
    if choice.leader is not None and choice.leader is not best:
        has_more = choice.leader.bits_per_weight > best.bits_per_weight
        why = "takes more bits" if has_more else "is not shown to hold to every rule"
        yield (
            f"by loss alone it would be `{choice.leader.subject}` at {choice.leader.scheme}, "
            f"which is indistinguishable and {why}"
        )
    soups = {s.label for s in table.subjects if s.kind == "soup"}
    rivals = {
        f"without {best.scheme}": (m for m in choice.ranked if m.scheme != best.scheme),
        "without soups": (
            m for m in choice.ranked if best.subject in soups and m.subject not in soups
        ),
    }
    for what, remaining in rivals.items():
        if (other := next(remaining, None)) is not None:
            yield f"{what} it would be `{other.subject}` at {other.scheme}"
    full = candidates(table, UNQUANTIZED)
    if full and full[0].subject != best.subject:
        yield f"in full precision it would be `{full[0].subject}`"


def pick_of(classes: Sequence[ClassVerdict]) -> Pick | None:
    """Return the one class that `pick` in audit.json and `@pick` are about."""
    named = [decision for decision in classes if decision.subject is not None]
    if not named:
        return None
    chosen = next((decision for decision in named if decision.bit_class == MAIN), named[0])
    columns: dict[str, Any] = vars(chosen) | {"interval": chosen.lead}
    subjects = dict.fromkeys(name.rpartition(" at ")[0] for name in chosen.contenders)
    columns["contenders"] = tuple(label for label in subjects if label != chosen.subject)
    return Pick(**{field.name: columns[field.name] for field in fields(Pick)})
