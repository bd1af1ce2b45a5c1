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

Protocol, versions and weights, which may have caused a difference, are compared as text and by
name, so that what a later version records is named, too. Accuracy is paired where both answered the
same items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qaudit.core import items, statistics
from qaudit.core.items import Marked
from qaudit.core.statistics import MINIMUM_DOCUMENTS, Array
from qaudit.errors import AuditError
from qaudit.judge.table import Cell, by_cell, divergences, losses
from qaudit.judge.tasks import answers, same_items, tasks_of
from qaudit.types import (
    FULL_PRECISION,
    AuditRecord,
    Changed,
    Delta,
    Difference,
    Evidence,
    Interval,
    Measurement,
    Reading,
    TaskDelta,
    TaskEvidence,
)


def changed(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[Changed, ...]:
    keys = dict.fromkeys([*a, *b])
    return tuple(Changed(key, a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key))


def _protocol(audit: AuditRecord) -> dict[str, str]:
    plan = audit.plan
    confidence = f"{plan.recipe.confidence:g}"
    machine = {"dtype": plan.dtype, "device": plan.device, "confidence": confidence}
    return dict(_flat(audit.protocol)) | machine


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        elif key not in ("notes", "has_chat_template"):  # they repeat others, or change nothing
            yield f"{before}{key}", str(value)


def _versions(audit: AuditRecord) -> dict[str, str]:
    environment = audit.environment
    libraries = environment.get("libraries")
    machine = {k: environment[k] for k in ("python", "platform", "processor") if k in environment}
    versions = (libraries if isinstance(libraries, dict) else {}) | machine
    return {"qaudit": audit.qaudit} | {key: str(value) for key, value in versions.items()}


def task_deltas(
    shared: Sequence[tuple[Cell, TaskEvidence, TaskEvidence]], level: float
) -> Iterator[TaskDelta]:
    """Yield what accuracy lost from a to b; below zero it rose."""
    for (subject, scheme), a, b in shared:
        before, after = answers(a).right_N, answers(b).right_N
        paired = same_items(a, b)
        if paired:
            drop = items.drop([Marked(after, before)], level, normalized=False)
            assert drop is not None
        else:
            drop = apart(statistics.accuracy(before, level), statistics.accuracy(after, level))
        same = (
            paired
            and np.array_equal(a.nll, b.nll, equal_nan=a.imported is not None)
            and np.array_equal(before, after)
        )
        yield TaskDelta(
            subject, scheme, a.task, drop, reading(drop, len(after), same=same), paired, len(after)
        )


def apart(a: Interval, b: Interval) -> Interval:
    """Return a minus b of two independent estimates (Zou and Donner 2008)."""
    estimate = a.estimate - b.estimate
    below = math.hypot(a.estimate - a.low, b.high - b.estimate)
    above = math.hypot(a.high - a.estimate, b.estimate - b.low)
    return Interval(estimate, estimate - below, estimate + above)


def reading(worse: Interval, count: int, *, same: bool) -> Reading:
    """Put a difference into a word; a positive one is worse, and too few decide nothing."""
    if same:
        return "same"
    if count < MINIMUM_DOCUMENTS or not math.isfinite(worse.estimate):
        return "unclear"
    if worse.low > 0:
        return "worse"
    return "better" if worse.high < 0 else "unclear"


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two audits: its name, its record, and its measurements on one text."""

    name: str
    audit: AuditRecord
    measurements: tuple[Measurement, ...]

    @cached_property
    def cells(self) -> dict[Cell, Measurement]:
        """Measurements by cell; of several draws of calibration text the first."""
        return {cell: draws[0] for cell, draws in by_cell(self.measurements).items()}

    @cached_property
    def evidence(self) -> Evidence:
        if not self.measurements:
            raise AuditError(f"`{self.name}` measured nothing", hint="name an audit that did")
        return self.measurements[0].evidence

    @cached_property
    def places(self) -> dict[str, int]:
        evidence = self.evidence
        return {sha: k for k, sha in enumerate(evidence.document_sha256) if evidence.tokens[k] > 0}


@dataclass(frozen=True, eq=False)
class _Common:
    """Which documents of each side are compared, whether they are the same, and in what unit."""

    sides: tuple[Side, Side]
    paired: bool
    rows: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]
    unit: Literal["nats per token", "bits per byte"]
    has_loss: bool
    notes: tuple[str, ...]
    shared: int

    def columns(self, cell: Cell, sums: Callable[[Evidence], Array]) -> list[Array]:
        """Return sums of the documents of a cell, in a and in b."""
        every = zip(self.sides, self.rows, strict=True)
        return [sums(side.cells[cell].evidence)[rows] for side, rows in every]

    def quantities(self, cell: Cell) -> dict[str, tuple[list[Array], list[Array], list[Array]]]:
        """Return sums, what is below them, and what else is equal where nothing has changed."""
        full, losses_of = (cell[0], FULL_PRECISION), self.columns(cell, losses)
        counts, quantities = self.columns(cell, self._counts), {}
        if self.has_loss:
            quantities["loss"] = losses_of, counts, losses_of
        if self.unit == "nats per token" and all(
            s.cells[cell].evidence.fidelity for s in self.sides
        ):
            quantities["kl"] = self.columns(cell, divergences), counts, losses_of
        if cell != full and all(full in side.cells for side in self.sides):
            beside = self.columns(full, losses)
            quantities["relative_error"] = losses_of, beside, beside
        return quantities

    def _counts(self, evidence: Evidence) -> Array:
        """Return what a loss is counted in: tokens, or bytes, in which nats become bits."""
        if self.unit == "bits per byte":
            return math.log(2) * evidence.nbytes.astype(np.float64)
        return evidence.tokens.astype(np.float64)


def diff(a: Side, b: Side) -> Difference:
    common = _common(a, b)
    cells = {cell: common.quantities(cell) for cell in b.cells if cell in a.cells}
    intervals = sum(scheme != FULL_PRECISION for _, scheme in cells)
    intervals += sum(len(quantities.keys() - {"relative_error"}) for quantities in cells.values())
    tasks = [
        (cell, task, theirs[name])
        for cell in cells
        for theirs in (tasks_of(b.cells[cell]),)
        for name, task in tasks_of(a.cells[cell]).items()
        if name in theirs
    ]
    at_once = max(1, intervals + len(tasks))
    confidence = min(a.audit.plan.recipe.confidence, b.audit.plan.recipe.confidence)
    level = statistics.simultaneous(confidence, at_once)
    meanings = changed(*({m.scheme: m.spec for m in side.measurements} for side in (a, b)))
    before = {subject.label: subject.content for subject in a.audit.subjects}
    return Difference(
        a=a.name,
        b=b.name,
        paired=common.paired,
        shared_documents=common.shared,
        documents=(len(a.places), len(b.places)),
        unit=common.unit,
        confidence=confidence,
        at_once=at_once,
        deltas=tuple(_delta(common, *each, level) for each in cells.items()),
        notes=common.notes,
        protocol=changed(_protocol(a.audit), _protocol(b.audit)),
        software=changed(_versions(a.audit), _versions(b.audit)),
        weights=tuple(
            s.label for s in b.audit.subjects if before.get(s.label, s.content) != s.content
        ),
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
    rows_of_a, rows_of_b = (
        np.array([side.places[sha] for sha in (shared if paired else side.places)], dtype=np.intp)
        for side in (a, b)
    )
    notes = []
    if not paired:
        notes.append(
            f"{len(shared)} documents are the same, too few to pair on: a difference holds the "
            "text as well as the model"
        )
    elif not whole:
        notes.append(f"compared on the {len(shared)} documents that both have")
    one_tokenizer = paired and all(
        np.array_equal(
            getattr(a.evidence, column)[rows_of_a], getattr(b.evidence, column)[rows_of_b]
        )
        for column in ("tokens", "nbytes")
    )
    has_bytes = bool(a.evidence.nbytes[rows_of_a].all() and b.evidence.nbytes[rows_of_b].all())
    if not one_tokenizer:
        why = "it is unknown whether the two have one tokenizer"
        if paired:
            why = "the same documents are other tokens in the two, by another tokenizer or protocol"
        how = ": losses are compared in bits per byte"
        if not has_bytes:
            how = ", and bytes were not counted: losses are not compared"
        notes.append(why + how)
    return _Common(
        sides=(a, b),
        paired=paired,
        rows=(rows_of_a, rows_of_b),
        unit="nats per token" if one_tokenizer else "bits per byte",
        has_loss=one_tokenizer or has_bytes,
        notes=tuple(notes),
        shared=len(shared),
    )


def _delta(
    common: _Common,
    cell: Cell,
    quantities: Mapping[str, tuple[list[Array], list[Array], list[Array]]],
    level: float,
) -> Delta:
    """Return the ratios of sums to what is below them, of b minus those of a."""
    documents = min(map(len, common.rows))
    columns: dict[str, Any] = {}
    for name in ("loss", "relative_error", "kl"):
        columns |= {name: None, f"{name}_reading": None}
        if name not in quantities:
            continue
        over, below, beside = quantities[name]
        (of_a, under_a), (of_b, under_b) = zip(over, below, strict=True)
        if not all(np.isfinite(column).all() for column in (*over, *below)):
            interval = statistics.UNKNOWN
        elif common.paired:
            four = (of_b, under_b, of_a, under_a)
            interval = statistics.interval(four, statistics.excess_difference, level)
        else:
            a, b = (
                statistics.interval(each, statistics.per_token, level)
                for each in zip(over, below, strict=True)
            )
            interval = apart(b, a)
        same = common.paired and all(np.array_equal(x, y) for x, y in (over, beside))
        columns |= {name: interval, f"{name}_reading": reading(interval, documents, same=same)}
    return Delta(*cell, documents=documents, **columns)
