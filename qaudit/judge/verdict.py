"""What ships of each bit class: a subject and a scheme, and how sure that is.

The winner of many looks better than it is on the documents it was chosen on. So it is chosen on
one half of them. Where the other half chooses the same pair, all documents judge it; otherwise
the other half alone does (`held_out`). Every number of a class is of the documents that judge it;
`confirmed_on` names them, and is None where all documents served for both. Contenders, which may
be as good, are those not worse with all comparisons at once (Bonferroni), so that none of many
is ruled out by luck alone.

Whether it may ship is for a policy: `judge.gate` fills in `level`, `status` and what they rest on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from qaudit.core import statistics
from qaudit.judge.candidates import (
    UNQUANTIZED,
    Cheapest,
    candidates,
    cheapest,
    classes_of,
    cross_fitted,
    excess,
)
from qaudit.judge.objectives import LOSS, Objective
from qaudit.judge.pooling import interval_of
from qaudit.judge.table import Measurements, divergences, losses
from qaudit.types import (
    FULL_PRECISION,
    HELD_OUT,
    NEAR_BASELINE,
    ClassVerdict,
    Interval,
    Measurement,
)


def choices(
    table: Measurements,
    objective: Objective = LOSS,
    classes: Sequence[str] = (),
    searched: Collection[str] = (),
) -> tuple[ClassVerdict, ...]:
    """Choose in each bit class, by default in all that were measured; no policy is applied.

    An objective that compares classes chooses once. Soups in `searched` were made for the documents
    to choose on, and are judged on the others.
    """
    fewest = cheapest(table, objective.margin or 0.0, classes) if objective.kind == "bits" else None
    if fewest is not None:
        return (_of_cheapest(table, objective, fewest, searched),)
    names = _classes(table, objective, classes)
    return tuple(_choice(table, objective, name, searched) for name in names)


def _classes(table: Measurements, objective: Objective, classes: Sequence[str]) -> Sequence[str]:
    if objective.kind == "bits":
        return ()
    if objective.scheme == FULL_PRECISION:
        return (UNQUANTIZED,)
    if objective.scheme is not None:
        of_scheme = (m for m in table.measurements if m.scheme == objective.scheme)
        return tuple(dict.fromkeys(m.bit_class for m in of_scheme))
    return classes or classes_of(table)


def _choice(
    table: Measurements, objective: Objective, name: str, searched: Collection[str]
) -> ClassVerdict:
    ranked, split = cross_fitted(table, name, objective)
    title = _title(objective, name)
    if not ranked:
        return ClassVerdict(name, "off", "undecided", None, None, title)
    best, *rivals = ranked
    second = rivals[0] if rivals else None
    split = _judging(table, best, split, searched)
    lead = _lead(table, objective, best, second, table.confidence, split) if second else None
    tied = [named(m) for m in rivals if _is_tied(table, objective, best, m, split)]
    contenders = _contenders(table, objective, ranked, split)
    return _measured(
        table,
        best,
        split,
        ClassVerdict(
            bit_class=name,
            level="off",
            status="undecided",
            subject=best.subject,
            scheme=best.scheme,
            objective=title,
            runner_up=second.subject if second else None,
            runner_up_scheme=second.scheme if second else None,
            lead=lead,
            confirmed_on=_confirmed(table, split) if lead and lead.high < 0 and not tied else None,
            contenders=tuple(dict.fromkeys((*tied, *contenders))),
            chosen_among=sum(m.subject == best.subject for m in ranked) if split is None else 1,
            changes=tuple(_changes(table, objective, best, ranked)),
        ),
    )


def _title(objective: Objective, name: str) -> str:
    what = f"{name} bits" if name.isdecimal() else name
    where = objective.scheme or (what if name != UNQUANTIZED else "full precision")
    if objective.kind == "kl":
        return f"lowest KL divergence at {where}, of the subject with the lowest quantized loss"
    return f"lowest quantized loss at {where}"


def _of_cheapest(
    table: Measurements, objective: Objective, fewest: Cheapest, searched: Collection[str]
) -> ClassVerdict:
    best, *rivals = fewest.ranked
    margin = objective.margin or 0.0
    split = _judging(table, best, fewest.split, searched)
    above = excess(table, best, fewest.reference, split)
    return _measured(
        table,
        best,
        split,
        ClassVerdict(
            bit_class=best.bit_class,
            level="off",
            status="undecided",
            subject=best.subject,
            scheme=best.scheme,
            objective=f"fewest bits per weight within {100 * margin:g} % of the loss of "
            f"`{fewest.reference.subject}` in full precision",
            runner_up=rivals[0].subject if rivals else None,
            runner_up_scheme=rivals[0].scheme if rivals else None,
            lead=above,
            reference=fewest.reference.subject,
            confirmed_on=_confirmed(table, split) if above.high <= margin else None,
            changes=fewest.changes,
        ),
    )


def _judging(
    table: Measurements, best: Measurement, split: str | None, searched: Collection[str]
) -> str | None:
    return HELD_OUT if table.is_split and best.subject in searched else split


def _measured(
    table: Measurements, best: Measurement, split: str | None, chosen: ClassVerdict
) -> ClassVerdict:
    cell, full = (best.subject, best.scheme), (best.subject, FULL_PRECISION)
    relative = None
    if best.scheme != FULL_PRECISION:
        relative = interval_of(table, [cell, full], statistics.excess, split=split)
    return replace(
        chosen,
        documents=int(table.scored(split).sum()),
        held_out=split == HELD_OUT,
        ce=interval_of(table, [cell], statistics.per_token, split=split),
        relative_error=relative,
        kl=interval_of(table, [cell], statistics.per_token, split=split, sums=divergences),
    )


def outright(
    table: Measurements, a: Measurement, b: Measurement, split: str | None, confidence: float
) -> Interval:
    return _lead(table, LOSS, a, b, confidence, split)


def _lead(
    table: Measurements,
    objective: Objective,
    a: Measurement,
    b: Measurement,
    confidence: float,
    split: str | None,
) -> Interval:
    cells = [(a.subject, a.scheme), (b.subject, b.scheme)]
    sums = divergences if objective.kind == "kl" else losses
    how = {"split": split, "confidence": confidence, "sums": sums}
    return interval_of(table, cells, statistics.change, **how) or statistics.UNKNOWN


def _confirmed(table: Measurements, split: str | None) -> str | None:
    """Name the documents that judge a choice; None where all of them served for both, or few."""
    held_out = int(table.scored(HELD_OUT).sum())
    if not table.is_split or held_out < statistics.MINIMUM_DOCUMENTS:
        return None
    if split == HELD_OUT:
        return f"{held_out} documents that it was not chosen on"
    return f"{table.documents} documents, each half of which chooses it"


def _contenders(
    table: Measurements, objective: Objective, ranked: Sequence[Measurement], split: str | None
) -> Iterator[str]:
    """Yield what is not significantly worse than the best, all compared at once."""
    best, *rivals = ranked
    level = statistics.simultaneous(table.confidence, len(rivals))
    # On too few documents nothing is ruled out, however far apart two losses are.
    few = int(table.scored(HELD_OUT).sum()) < statistics.MINIMUM_DOCUMENTS
    for other in rivals:
        if few or _lead(table, objective, best, other, level, split).high >= 0:
            yield named(other)


def _is_tied(
    table: Measurements,
    objective: Objective,
    best: Measurement,
    other: Measurement,
    split: str | None,
) -> bool:
    """Whether two are too near full precision for their KL divergence to rank them."""
    if objective.kind != "kl":
        return False
    cells = [(m.subject, m.scheme) for m in (best, other)]
    both = [
        interval_of(table, [cell], statistics.per_token, split=split, sums=divergences)
        for cell in cells
    ]
    return all(kl is not None and kl.estimate < NEAR_BASELINE for kl in both)


def named(measured: Measurement) -> str:
    return f"{measured.subject} at {measured.scheme}"


def _changes(
    table: Measurements, objective: Objective, best: Measurement, ranked: Sequence[Measurement]
) -> Iterator[str]:
    """Yield what the choice would be if something were left out."""
    if objective.kind == "kl":
        return
    soups = {s.label for s in table.subjects if s.kind == "soup"}
    rivals = {
        f"without {best.scheme}": (m for m in ranked if m.scheme != best.scheme),
        "without soups": (m for m in ranked if best.subject in soups and m.subject not in soups),
    }
    for what, left in rivals.items():
        if (other := next(left, None)) is not None:
            yield f"{what} it would be `{other.subject}` at {other.scheme}"
    full = candidates(table, UNQUANTIZED)
    if full and full[0].subject != best.subject:
        yield f"in full precision it would be `{full[0].subject}`"
