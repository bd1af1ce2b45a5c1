"""Compare two saved audits, b against a: what changed, by how much, and possible causes.

Where both were measured on the same documents, differences are paired on them, even if each has
others besides: what a document does to both falls out, and intervals are several times narrower.
Ten shared documents are the least. Where fewer are shared the two are unpaired: each has its own
interval, and the difference reaches as far as both do together (the method of variance estimates
recovery, Zou and Donner 2008). Such a difference includes the text's, and has a note.

A loss per token means another thing to another tokenizer. Two audits have the same one, and cut
alike, if every shared document has the same tokens and bytes in both; else, and wherever nothing
is shared to tell it by, losses are compared in bits per byte, or not at all where bytes are not
known. Relative error is the same number in both units.

All intervals of one difference hold at once (Bonferroni), since a reader of fifty of them looks
for the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics
from qaudit.core.draws import DrawNoise, pooled
from qaudit.core.statistics import MINIMUM_DOCUMENTS, Array
from qaudit.errors import AuditError
from qaudit.judge.causes import changed, other_weights, protocol_of, versions_of
from qaudit.judge.draw_noise import noise_in, noise_of
from qaudit.judge.table import Cell, Measurements, Sums, by_cell, divergences, losses
from qaudit.judge.task_changes import apart, reading, shared_tasks, task_deltas
from qaudit.types import (
    FULL_PRECISION,
    AuditRecord,
    Delta,
    Difference,
    Evidence,
    Interval,
    Measurement,
    Reading,
)

Unit = Literal["nats per token", "bits per byte"]
Rows = npt.NDArray[np.intp]
Ratio = tuple[Array, Array]
"""What is summed over documents above the line, (draws, documents), and below it."""

Draws = tuple[Sequence[Measurement], Sequence[Measurement]]
"""Of a, and of b."""


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two audits: its name, its record, and its measurements on one text."""

    name: str
    audit: AuditRecord
    measurements: tuple[Measurement, ...]

    @cached_property
    def draws(self) -> dict[Cell, list[Measurement]]:
        return by_cell(self.measurements)

    @cached_property
    def table(self) -> Measurements:
        subjects, confidence = self.audit.subjects, self.audit.plan.recipe.confidence
        return Measurements(subjects, self.measurements, confidence)

    @cached_property
    def evidence(self) -> Evidence:
        if not self.measurements:
            raise AuditError(f"`{self.name}` measured nothing", hint="name an audit that did")
        if not self.measurements[0].evidence.document_sha256:
            raise AuditError(
                f"`{self.name}` has imported answers alone, and no loss to compare",
                hint="scan the weights of both",
            )
        return self.measurements[0].evidence

    @cached_property
    def places(self) -> dict[str, int]:
        evidence = self.evidence
        return {sha: k for k, sha in enumerate(evidence.document_sha256) if evidence.tokens[k] > 0}


@dataclass(frozen=True, eq=False)
class _Common:
    """Which documents of each side are compared, whether they are the same, and in what unit."""

    paired: bool
    rows: tuple[Rows, Rows]
    unit: Unit
    has_loss: bool
    notes: tuple[str, ...]
    shared: int


def diff(a: Side, b: Side) -> Difference:
    common = _common(a, b)
    cells = [cell for cell in b.draws if cell in a.draws]
    quantized = sum(scheme != FULL_PRECISION for _, scheme in cells)
    has_kl = [cell for cell in cells if _has_kl(a, b, cell, common)]
    tasks = shared_tasks([(cell, a.draws[cell][0], b.draws[cell][0]) for cell in cells])
    losses = len(cells) if common.has_loss else 0
    at_once = max(1, quantized + losses + len(has_kl) + len(tasks))
    confidence = min(a.audit.plan.recipe.confidence, b.audit.plan.recipe.confidence)
    level = statistics.simultaneous(confidence, at_once)
    meanings = changed(*({m.scheme: m.spec for m in side.measurements} for side in (a, b)))
    return Difference(
        a=a.name,
        b=b.name,
        paired=common.paired,
        shared_documents=common.shared,
        documents=(len(a.places), len(b.places)),
        unit=common.unit,
        confidence=confidence,
        at_once=at_once,
        deltas=tuple(_delta(a, b, cell, common, level) for cell in cells),
        notes=common.notes,
        protocol=changed(protocol_of(a.audit), protocol_of(b.audit)),
        software=changed(versions_of(a.audit), versions_of(b.audit)),
        weights=tuple(other_weights(a.audit, b.audit)),
        specs=tuple(c for c in meanings if c.a is not None and c.b is not None),
        subjects=changed(*({s.label: s.label for s in side.audit.subjects} for side in (a, b))),
        schemes=changed(*({m.scheme: m.scheme for m in side.measurements} for side in (a, b))),
        picks=(a.audit.pick, b.audit.pick),
        tasks=tuple(task_deltas(tasks, level)),
    )


def _common(a: Side, b: Side) -> _Common:
    shared = [sha for sha in a.places if sha in b.places]
    whole = len(shared) == len(a.places) == len(b.places)
    paired = whole or len(shared) >= MINIMUM_DOCUMENTS
    left, right = (_rows(side, shared if paired else list(side.places)) for side in (a, b))
    notes = []
    if not paired:
        notes.append(
            f"{len(shared)} documents are the same, too few to pair on: a difference holds the "
            "text as well as the model"
        )
    elif not whole:
        notes.append(f"compared on the {len(shared)} documents that both have")
    alike = paired and all(
        np.array_equal(getattr(a.evidence, column)[left], getattr(b.evidence, column)[right])
        for column in ("tokens", "nbytes")
    )
    if alike:
        return _Common(paired, (left, right), "nats per token", True, tuple(notes), len(shared))
    all_measured = all(s.evidence.nbytes[r].all() for s, r in ((a, left), (b, right)))
    notes.append(_unlike(paired=paired, known=all_measured))
    return _Common(paired, (left, right), "bits per byte", all_measured, tuple(notes), len(shared))


def _rows(side: Side, documents: Sequence[str]) -> Rows:
    return np.array([side.places[sha] for sha in documents], dtype=np.intp)


def _unlike(*, paired: bool, known: bool) -> str:
    why = (
        "the same documents are other tokens in the two, by another tokenizer or protocol"
        if paired
        else "it is unknown whether the two have one tokenizer"
    )
    if known:
        return f"{why}: losses are compared in bits per byte"
    return f"{why}, and bytes were not counted: losses are not compared"


def _delta(a: Side, b: Side, cell: Cell, common: _Common, level: float) -> Delta:
    full = (cell[0], FULL_PRECISION)
    draws: Draws = (a.draws[cell], b.draws[cell])
    if common.paired:
        draws = _in_step(*draws)
    documents = min(map(len, common.rows))
    same = _identical(draws, common)
    loss = error = None
    same_error = False
    noises = _noises(a, b, cell)
    if common.has_loss:
        left, right = (_loss(side, k, common) for k, side in enumerate(draws))
        loss = _between((left, right), noises, common, level)
    kl = None
    if _has_kl(a, b, cell, common):
        left, right = (_divergence(draws[k], common.rows[k]) for k in (0, 1))
        kl = _between((left, right), _noises(a, b, cell, divergences), common, level)
    if cell != full and full in a.draws and full in b.draws:
        wholes = a.draws[full][:1], b.draws[full][:1]
        left, right = (_error(draws[k], wholes[k][0], common.rows[k]) for k in (0, 1))
        error = _between((left, right), noises, common, level)
        same_error = same and _identical(wholes, common)
    return Delta(
        subject=cell[0],
        scheme=cell[1],
        loss=loss,
        loss_reading=_reading(loss, documents, same),
        relative_error=error,
        error_reading=_reading(error, documents, same_error),
        documents=documents,
        kl=kl,
        kl_reading=_reading(kl, documents, same and _identical(draws, common, divergences)),
    )


def _noises(a: Side, b: Side, cell: Cell, sums: Sums = losses) -> tuple[DrawNoise | None, ...]:
    """The draws of either audit tell of the same scheme in the other one."""
    of_a, of_b = (noise_of(side.table, cell, sums=sums) for side in (a, b))
    return noise_in(of_a or of_b), noise_in(of_b or of_a)


def _has_kl(a: Side, b: Side, cell: Cell, common: _Common) -> bool:
    """Return whether both have divergences of a cell, in the same tokens."""
    draws = (*a.draws[cell], *b.draws[cell])
    return common.unit == "nats per token" and all(m.evidence.fidelity for m in draws)


def _in_step(a: Sequence[Measurement], b: Sequence[Measurement]) -> Draws:
    """Return the draws of seeds that both have, or the first ones where no seed is common."""
    seeds = {m.calibration_seed for m in a} & {m.calibration_seed for m in b}
    if seeds:
        a, b = ([m for m in draws if m.calibration_seed in seeds] for draws in (a, b))
    number = min(len(a), len(b))
    return a[:number], b[:number]


def _identical(draws: Draws, common: _Common, sums: Sums = losses) -> bool:
    """Return whether every shared document has the same sum in both, to the bit."""
    of_a, of_b = common.rows
    return common.paired and all(
        np.array_equal(sums(left.evidence)[of_a], sums(right.evidence)[of_b])
        for left, right in zip(*draws, strict=True)
    )


def _loss(draws: Sequence[Measurement], side: int, common: _Common) -> Ratio:
    """Return sums of losses over tokens; or over bytes, in which nats become bits."""
    rows, evidence = common.rows[side], draws[0].evidence
    below = evidence.tokens.astype(np.float64)
    if common.unit == "bits per byte":
        below = math.log(2) * evidence.nbytes.astype(np.float64)
    return _stacked(draws, rows), below[rows]


def _error(draws: Sequence[Measurement], full: Measurement, rows: Rows) -> Ratio:
    """Return sums of losses over those of full precision: one more than the relative error."""
    return _stacked(draws, rows), full.evidence.nll_sum[rows]


def _divergence(draws: Sequence[Measurement], rows: Rows) -> Ratio:
    tokens = draws[0].evidence.tokens[rows].astype(np.float64)
    return np.stack([divergences(m.evidence)[rows] for m in draws]), tokens


def _stacked(draws: Sequence[Measurement], rows: Rows) -> Array:
    return np.stack([m.evidence.nll_sum[rows] for m in draws])


def _between(
    ratios: tuple[Ratio, Ratio],
    noises: tuple[DrawNoise | None, ...],
    common: _Common,
    level: float,
) -> Interval:
    if not all(np.isfinite(column).all() for ratio in ratios for column in ratio):
        return statistics.UNKNOWN
    (a, b), (of_a, of_b) = ratios, noises
    if common.paired:
        known = (of_b, None, of_a, None)
        return pooled((*b, *a), statistics.excess_difference, level, known).interval
    left, right = (
        pooled(each, statistics.per_token, level, (noise, None)).interval
        for each, noise in ((a, of_a), (b, of_b))
    )
    return apart(right, left)


def _reading(difference: Interval | None, documents: int, same: bool) -> Reading | None:
    return None if difference is None else reading(difference, documents, same=same)
