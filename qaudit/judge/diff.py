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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qaudit.core import items, statistics
from qaudit.core.items import Marked
from qaudit.core.statistics import MINIMUM_DOCUMENTS, Array
from qaudit.errors import AuditError
from qaudit.judge.table import Cell, Sums, by_cell, divergences, losses
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


def protocol_of(audit: AuditRecord) -> dict[str, str]:
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


def versions_of(audit: AuditRecord) -> dict[str, str]:
    environment = audit.environment
    libraries = environment.get("libraries")
    versions = {k: str(v) for k, v in libraries.items()} if isinstance(libraries, dict) else {}
    for key in ("python", "platform", "processor"):
        if key in environment:
            versions[key] = str(environment[key])
    return {"qaudit": audit.qaudit, **versions}


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


Unit = Literal["nats per token", "bits per byte"]
Rows = npt.NDArray[np.intp]
Two = tuple[Measurement, Measurement]
"""Of a, and of b."""


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

    paired: bool
    rows: tuple[Rows, Rows]
    unit: Unit
    has_loss: bool
    notes: tuple[str, ...]
    shared: int


def diff(a: Side, b: Side) -> Difference:
    common = _common(a, b)
    cells = [cell for cell in b.cells if cell in a.cells]
    quantized = sum(scheme != FULL_PRECISION for _, scheme in cells)
    has_kl = [cell for cell in cells if _has_kl((a.cells[cell], b.cells[cell]), common)]
    tasks = [
        (cell, task, theirs[name])
        for cell in cells
        for theirs in (tasks_of(b.cells[cell]),)
        for name, task in tasks_of(a.cells[cell]).items()
        if name in theirs
    ]
    losses = len(cells) if common.has_loss else 0
    at_once = max(1, quantized + losses + len(has_kl) + len(tasks))
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
        deltas=tuple(_delta(a, b, cell, common, level) for cell in cells),
        notes=common.notes,
        protocol=changed(protocol_of(a.audit), protocol_of(b.audit)),
        software=changed(versions_of(a.audit), versions_of(b.audit)),
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
        paired=paired,
        rows=(rows_of_a, rows_of_b),
        unit="nats per token" if one_tokenizer else "bits per byte",
        has_loss=one_tokenizer or has_bytes,
        notes=tuple(notes),
        shared=len(shared),
    )


def _delta(a: Side, b: Side, cell: Cell, common: _Common, level: float) -> Delta:
    full = (cell[0], FULL_PRECISION)
    two = (a.cells[cell], b.cells[cell])
    documents = min(map(len, common.rows))
    same, same_error = _identical(two, common), False
    loss = kl = error = None
    counts = [_units(m, r, common.unit) for m, r in zip(two, common.rows, strict=True)]
    if common.has_loss:
        loss = _between(two, counts, common, level)
    if _has_kl(two, common):
        kl = _between(two, counts, common, level, divergences)
    if cell != full and full in a.cells and full in b.cells:
        whole = (a.cells[full], b.cells[full])
        sums = [m.evidence.nll_sum[rows] for m, rows in zip(whole, common.rows, strict=True)]
        error = _between(two, sums, common, level)
        same_error = same and _identical(whole, common)
    return Delta(
        subject=cell[0],
        scheme=cell[1],
        loss=loss,
        loss_reading=_reading(loss, documents, same),
        relative_error=error,
        relative_error_reading=_reading(error, documents, same_error),
        documents=documents,
        kl=kl,
        kl_reading=_reading(kl, documents, same and _identical(two, common, divergences)),
    )


def _has_kl(two: Two, common: _Common) -> bool:
    """Return whether both have divergences, in the same tokens."""
    return common.unit == "nats per token" and all(m.evidence.fidelity for m in two)


def _identical(two: Two, common: _Common, sums: Sums = losses) -> bool:
    """Return whether every shared document has the same sum in both, to the bit."""
    a, b = (sums(m.evidence)[rows] for m, rows in zip(two, common.rows, strict=True))
    return common.paired and np.array_equal(a, b)


def _units(measured: Measurement, rows: Rows, unit: Unit) -> Array:
    """Return what a loss is counted in: tokens, or bytes, in which nats become bits."""
    if unit == "bits per byte":
        return math.log(2) * measured.evidence.nbytes[rows].astype(np.float64)
    return measured.evidence.tokens[rows].astype(np.float64)


def _between(
    two: Two, below: Sequence[Array], common: _Common, level: float, sums: Sums = losses
) -> Interval:
    """Return the ratio of sums to what is below them, of b minus that of a."""
    a, b = (
        (sums(m.evidence)[rows], under)
        for m, rows, under in zip(two, common.rows, below, strict=True)
    )
    if not all(np.isfinite(column).all() for column in (*a, *b)):
        return statistics.UNKNOWN
    if common.paired:
        return statistics.interval((*b, *a), statistics.excess_difference, level)
    before, after = (statistics.interval(each, statistics.per_token, level) for each in (a, b))
    return apart(after, before)


def _reading(difference: Interval | None, documents: int, same: bool) -> Reading | None:
    return None if difference is None else reading(difference, documents, same=same)
