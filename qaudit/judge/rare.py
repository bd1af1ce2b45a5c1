"""Damage that few documents carry: an interval over documents may miss it.

An interval learns how far documents scatter from those that were measured. Where a document in
fifty loses 27 times as much as the others, half of all audits of 32 documents meet none of these:
their intervals are narrow, and hold the true value in 55 to 64 % of cases (`benchmarks.coverage`).
Nothing in the numbers of such an audit shows it. Where one was met, it shows: a single document
then carries much of what quantization adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qaudit.core.statistics import Array
from qaudit.judge.pooling import column_of
from qaudit.judge.table import Cell, Measurements
from qaudit.types import FULL_PRECISION, Finding

CONSPICUOUS = 0.2
"""Of what a scheme changes, carried by one document.

Without rare damage 1 % of samples of 64 documents reach it where damage is lognormal, 8 to 10 %
where its tails are heavier, and half where they are Pareto's; of 32 documents 13 to 39 %, and 75 %.
"""

MATTERS = 0.001
"""Of the loss: where a scheme adds less, one document carrying it changes no decision."""

FEW = 6.0
"""Among few documents the largest of ordinary ones carries up to so many times its equal share."""


@dataclass(frozen=True)
class WorstDocument:
    """The document that carries most of what a scheme adds to a subject's loss."""

    share: float  # of the loss that all documents together gain
    of_changes: float  # share of all changes, gains and losses: near zero added they cancel
    added: float  # by the scheme over all documents, as a fraction of the loss
    sha256: str
    documents: int

    @property
    def is_conspicuous(self) -> bool:
        return self.added >= MATTERS and self.of_changes > max(CONSPICUOUS, FEW / self.documents)


def worst_document(table: Measurements, cell: Cell) -> WorstDocument | None:
    """Return a cell's worst document; None where quantization added no loss."""
    own, full = (column_of(table, (cell[0], scheme)) for scheme in (cell[1], FULL_PRECISION))
    if cell[1] == FULL_PRECISION or own is None or full is None:
        return None
    added_D = own - full
    share = largest_share(added_D)
    if share is None:
        return None
    place = int(np.argmax(added_D))
    names = np.array(table.draws(*cell)[0].evidence.document_sha256)[table.scored()]
    return WorstDocument(
        share,
        of_changes=float(added_D[place] / np.abs(added_D).sum()),
        added=float(added_D.sum() / full.sum()),
        sha256=str(names[place]),
        documents=len(added_D),
    )


def largest_share(added_D: Array) -> float | None:
    """Return the largest part that a document has of a sum; None where the sum is no gain."""
    total = float(added_D.sum())
    return float(added_D.max()) / total if total > 0 else None


def rare_damage(table: Measurements) -> Iterator[Finding]:
    """Yield a finding for each scheme of which one document carries much: the worst subject's."""
    labels = [subject.label for subject in table.subjects]
    for scheme in table.quantized_schemes:
        every = ((label, worst_document(table, (label, scheme))) for label in labels)
        heavy = [
            (label, damage)
            for label, damage in every
            if damage is not None and damage.is_conspicuous
        ]
        if not heavy:
            continue
        label, worst = max(heavy, key=lambda pair: pair[1].share)
        more = f"; so it is with {len(heavy) - 1} more subjects" if len(heavy) > 1 else ""
        message = (
            f"1 of {worst.documents} documents carries {100 * worst.share:.0f} % of the loss "
            f"that {scheme} adds to `{label}`, and intervals may miss an added loss as rare{more}"
        )
        hint = f"read document {worst.sha256[:12]}, and measure more documents like it"
        yield Finding("QA029", "warn", label, scheme, message, hint)
