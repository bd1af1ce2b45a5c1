"""The one subject and scheme to ship, by an objective, and how sure that is.

The winner of many looks better than it is on the documents it was chosen on. So it is chosen on
one half of them and compared with the runner-up on the other half, which is free of that bias;
`confirmed_on` names it, and is None where all documents served for both. Contenders, which may be
as good, are those not worse with all comparisons at once (Bonferroni), so that none of many
subjects is ruled out by luck alone.

"Best" is an objective:

loss              the lowest quantized loss, at gptq-4bit or else the first scheme measured
loss@awq-3bit     the same at a scheme of one's own
bits@1%           the fewest bits per weight whose loss stays within 1 % of the best loss in
                  full precision, over all subjects
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qaudit.core import statistics
from qaudit.core.keys import nearest
from qaudit.errors import UsageError
from qaudit.judge.pooling import estimated
from qaudit.judge.table import Table, is_finite
from qaudit.types import FULL_PRECISION, HELD_OUT, SELECTION, Interval, Measurement, Pick

PREFERRED = "gptq-4bit"
EXAMPLES = ("loss", f"loss@{PREFERRED}", "bits@1%", "pareto")
SAME_BITS = 0.05
"""Bits per weight within which schemes cost the same: their scales differ by as much."""


@dataclass(frozen=True)
class Objective:
    """One of the forms above."""

    kind: Literal["loss", "bits"] = "loss"
    scheme: str | None = None
    margin: float | None = None

    def __str__(self) -> str:
        if self.kind == "bits":
            return f"bits@{100 * (self.margin or 0):g}%"
        return f"loss@{self.scheme}" if self.scheme else "loss"


def parse_objective(text: str) -> Objective:
    """Read an objective."""
    kind, at, rest = text.strip().partition("@")
    if kind == "loss" and (rest or not at):
        return Objective("loss", scheme=rest or None)
    if kind == "bits":
        return Objective("bits", margin=_margin(text, rest))
    raise UsageError(f"there is no objective `{text}`", hint=nearest(text, EXAMPLES))


def _margin(text: str, rest: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", rest)
    if match is None:
        raise UsageError(f"`{text}` has no margin in percent", hint="write `bits@1%`")
    margin = float(match[1]) / (100 if match[2] else 1)
    if not 0 < margin < 1:
        raise UsageError(
            f"a margin of {100 * margin:g} % is not between 0 and 100 %", hint="write `bits@1%`"
        )
    return margin


def choose(table: Table, objective: Objective | None = None) -> Pick | None:
    """Pick a subject and a scheme, or nothing where nothing is measured that could be."""
    objective = objective or Objective()
    if objective.kind == "bits":
        return _fewest_bits(table, objective.margin or 0.0)
    scheme = objective.scheme or picked_scheme(table)
    return _lowest_loss(table, scheme) if scheme else None


def picked_scheme(table: Table) -> str | None:
    """Return the scheme to pick at: the preferred one, or the first quantized one measured."""
    schemes = table.quantized_schemes
    if PREFERRED in schemes:
        return PREFERRED
    return schemes[0] if schemes else None


def ranking(table: Table, scheme: str, split: str | None = None) -> list[Measurement]:
    """Return subjects with a finite loss under a scheme, the lowest first, by their first draw."""
    draws_of = [table.draws(s.label, scheme) for s in table.subjects]
    finite = [draws for draws in draws_of if draws and all(map(is_finite, draws))]
    if not finite:
        return []
    scored = table.scored(split)

    def loss(draws: Sequence[Measurement]) -> float:
        return float(np.mean([m.evidence.nll_sum[scored].sum() for m in draws]))

    return [draws[0] for draws in sorted(finite, key=loss)]


def outright(
    table: Table, a: Measurement, b: Measurement, split: str | None, confidence: float
) -> Interval:
    """Return the loss of a minus that of b on the documents of a split, over all draws."""
    cells = [(a.subject, a.scheme), (b.subject, b.scheme)]
    result = estimated(table, cells, statistics.change, split=split, confidence=confidence)
    return result.interval if result else statistics.UNKNOWN


# ------------------------------------------------------------------------------- lowest loss


def _lowest_loss(table: Table, scheme: str) -> Pick | None:
    ranked = _without_twins(ranking(table, scheme, SELECTION))
    if not ranked:
        return None
    best, interval = ranked[0], None
    if len(ranked) > 1:
        interval = outright(table, best, ranked[1], HELD_OUT, table.confidence)
    return Pick(
        subject=best.subject,
        scheme=scheme,
        objective=f"lowest quantized loss at {scheme}",
        runner_up=ranked[1].subject if len(ranked) > 1 else None,
        interval=interval,
        confirmed_on=_confirmed(table, interval is not None and interval.high < 0),
        contenders=tuple(_contenders(table, ranked)),
        changes=tuple(_changes(table, best, ranked)),
    )


def _without_twins(ranked: Sequence[Measurement]) -> list[Measurement]:
    """Leave out subjects with the losses of an earlier one, to the bit: two names of one model.

    They do not differ, and a runner-up must be another model.
    """
    distinct: list[Measurement] = []
    for measured in ranked:
        losses = measured.evidence.nll_sum
        if not any(np.array_equal(losses, other.evidence.nll_sum) for other in distinct):
            distinct.append(measured)
    return distinct


def _confirmed(table: Table, holds: bool) -> str | None:
    held_out = int(table.scored(HELD_OUT).sum())
    if not holds or not table.is_split or held_out < statistics.MINIMUM_DOCUMENTS:
        return None
    return f"{held_out} documents that it was not chosen on"


def _contenders(table: Table, ranked: Sequence[Measurement]) -> Iterator[str]:
    """Yield the subjects that are not significantly worse than the best, all compared at once."""
    best, *others = ranked
    level = statistics.simultaneous(table.confidence, len(others))
    # On too few documents nothing is ruled out, however far apart two losses are.
    few = int(table.scored(HELD_OUT).sum()) < statistics.MINIMUM_DOCUMENTS
    for other in others:
        if few or outright(table, best, other, HELD_OUT, level).high >= 0:
            yield other.subject


def _changes(table: Table, best: Measurement, ranked: Sequence[Measurement]) -> Iterator[str]:
    winners: dict[str, list[str]] = {}
    for scheme in table.quantized_schemes:
        ranks = ranking(table, scheme, SELECTION)
        if ranks and ranks[0].subject != best.subject:
            winners.setdefault(ranks[0].subject, []).append(scheme)
    for subject, schemes in winners.items():
        yield f"at {', '.join(schemes)} it would be `{subject}`"
    soups = {s.label for s in table.subjects if s.kind == "soup"}
    single = next((m.subject for m in ranked if m.subject not in soups), None)
    if best.subject in soups and single is not None:
        yield f"without soups it would be `{single}`"
    full = ranking(table, FULL_PRECISION, SELECTION)
    if full and full[0].subject != best.subject:
        yield f"in full precision it would be `{full[0].subject}`"


# ------------------------------------------------------------------------------- fewest bits


@dataclass(frozen=True, eq=False)
class _Candidate:
    measurement: Measurement
    excess: Interval  # over the reference's loss, as a fraction, on the documents to choose on

    @property
    def loss(self) -> float:
        return self.excess.estimate


def _fewest_bits(table: Table, margin: float) -> Pick | None:
    full = ranking(table, FULL_PRECISION, SELECTION)
    if not full:
        return None
    reference = full[0]
    every = [
        _Candidate(m, _excess(table, m, reference, SELECTION))
        for scheme in (*table.quantized_schemes, FULL_PRECISION)
        for m in ranking(table, scheme, SELECTION)
    ]
    within = [c for c in every if c.excess.high <= margin]
    if not within:
        return None
    best, *others = _cheapest_first(within)
    excess = _excess(table, best.measurement, reference, HELD_OUT)
    return Pick(
        subject=best.measurement.subject,
        scheme=best.measurement.scheme,
        objective=f"fewest bits per weight within {100 * margin:g} % of the loss of "
        f"`{reference.subject}` in full precision",
        runner_up=others[0].measurement.subject if others else None,
        interval=excess,
        confirmed_on=_confirmed(table, excess.high <= margin),
        reference=reference.subject,
        changes=tuple(_cheaper(every, best, margin)),
    )


def _excess(table: Table, measured: Measurement, reference: Measurement, split: str) -> Interval:
    cells = [(measured.subject, measured.scheme), (reference.subject, reference.scheme)]
    result = estimated(table, cells, statistics.excess, split=split)
    return result.interval if result else statistics.UNKNOWN


def _cheapest_first(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Order by bits, and by loss among those of one price; only the first places matter."""
    left, ordered = list(candidates), []
    while left:
        price = min(c.measurement.bits_per_weight for c in left) + SAME_BITS
        same = [c for c in left if c.measurement.bits_per_weight <= price]
        ordered += sorted(same, key=lambda c: c.loss)
        left = [c for c in left if c.measurement.bits_per_weight > price]
    return ordered


def _cheaper(every: Sequence[_Candidate], best: _Candidate, margin: float) -> Iterator[str]:
    """Yield the margin within which fewer bits would do, for the nearest candidate."""
    bits = best.measurement.bits_per_weight - SAME_BITS
    cheaper = [c for c in every if c.measurement.bits_per_weight < bits]
    if not cheaper:
        return
    nearest = min(cheaper, key=lambda c: c.excess.high)
    measured, high = nearest.measurement, nearest.excess.high
    if np.isfinite(high) and high > margin:
        yield (
            f"within {100 * high:.2g} % it would be `{measured.subject}` at {measured.scheme} "
            f"({measured.bits_per_weight:.2f} bits)"
        )
