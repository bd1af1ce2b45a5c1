"""A recipe resolved, the work in units and what every process agrees on, and the whole audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import add
from typing import Any, Literal

from qaudit.settings import Recipe
from qaudit.types.conclusions import Comparison, Finding, MeasurementRow, Pick, TaskRow, Verdict
from qaudit.types.rows import Diagnostics
from qaudit.types.subjects import Checkpoint, Subject, TextFile, digest

PluginKind = Literal["scheme", "merge", "format", "reader", "diagnostic"]


@dataclass(frozen=True)
class Plugin:
    """A plug-in of another distribution, which measured what an audit has of it."""

    kind: PluginKind
    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True)
class Traffic:
    """What a plan takes from the Hub, and what it leaves on the disk at its worst moment."""

    nbytes_to_fetch: int
    nbytes_cached: int
    nbytes_disk_peak: int
    nbytes_disk_free: int
    nbytes_disk_budget: int | None = None


@dataclass(frozen=True)
class Price:
    """What work costs."""

    flops: float = 0.0
    nbytes_read: int = 0  # of weights
    streams: int = 0  # models that are evaluated

    def __add__(self, other: Price) -> Price:
        return Price(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Pass:
    """One subject sent once through its blocks, every stream side by side."""

    subject: Subject
    schemes: tuple[str, ...]  # in canonical form
    full_precision: bool = True  # whether the model as it is becomes a measurement, too
    draw: int = 0  # of the calibration text
    perturbed: bool = False  # rounded otherwise, to measure what arithmetic alone moves
    price: Price = Price()
    shipped: tuple[Checkpoint, ...] = ()  # the quantized files that `schemes` names
    reference: Subject | None = None  # runs beside it: its streams are compared with this one too

    @property
    def beside(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that are read beside the subject."""
        members = self.reference.members if self.reference else ()
        return (*self.shipped, *(checkpoint for checkpoint, _ in members))

    @property
    def is_candidate(self) -> bool:
        """Return whether a search alone reads its loss."""
        measures = self.full_precision or self.is_quantized
        return not (measures or self.draw or self.perturbed)

    @property
    def is_quantized(self) -> bool:
        """Return whether the subject is such a file itself: there is no full precision."""
        first = self.subject.first
        return any((file.ref, file.files) == (first.ref, first.files) for file in self.shipped)


@dataclass(frozen=True)
class Further:
    """The upper price of computing otherwise what ships."""

    streams: int
    seconds_low: float
    seconds_high: float


@dataclass(frozen=True)
class Plan:
    """The recipe resolved and priced, before the first byte of weights is read."""

    recipe: Recipe
    subjects: tuple[Subject, ...]
    specs: tuple[str, ...]
    device: str
    dtype: str
    context: int
    parameters: int
    blocks: int
    nbytes_read: int
    nbytes_memory: int
    nbytes_memory_fixed: int
    nbytes_memory_available: int
    streams: int  # models that are evaluated, in all passes
    seconds_low: float
    seconds_high: float
    notes: tuple[str, ...] = ()
    texts: tuple[TextFile, ...] = ()
    traffic: Traffic | None = None  # None: every target is a local folder
    findings: tuple[Finding, ...] = ()  # what is wrong by names and hashes alone
    detectable_relative_error: float | None = None  # with 80 % power; not known of a plan
    diagnoses: tuple[str, ...] = ()  # requested of each subject, and their cost
    item_context: int | None = None  # tokens that an option of a task may have before it
    passes: tuple[Pass, ...] = ()  # the work itself, in order; not saved with an audit
    otherwise: Further | None = None  # the upper price of rounding what ships otherwise
    shipped: tuple[Checkpoint, ...] = ()  # quantized already, measured as they are
    plugins: tuple[Plugin, ...] = ()  # of other distributions
    column_loop: str = "plain"  # how GPTQ's columns are rounded (`qaudit/core/column_loops.py`)
    nbytes_disk: int = 0  # beside downloads: hidden states, and quantized weights between rounds


@dataclass(frozen=True)
class Skipped:
    """What was planned and not measured, and why."""

    subject: str
    scheme: str | None
    reason: str


@dataclass(frozen=True)
class Signature:
    """What shows that an audit and its evidence are as they were signed."""

    method: str
    value: str


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """Everything that was planned, measured, skipped and concluded."""

    schema: Literal["1"]
    qaudit: str
    plan: Plan
    environment: dict[str, Any]
    subjects: tuple[Subject, ...]
    measurements: tuple[MeasurementRow, ...]
    comparisons: tuple[Comparison, ...]
    diagnostics: Diagnostics
    findings: tuple[Finding, ...]
    pick: Pick | None
    verdict: Verdict | None = None  # None: nothing quantized was measured
    skipped: tuple[Skipped, ...]
    tasks: tuple[TaskRow, ...]
    signature: Signature | None = None
    protocol: dict[str, Any] = field(default_factory=dict)  # in audit.json a part of the plan


@dataclass(frozen=True)
class Resolved:
    """What a recipe means today, exactly enough to be the same thing tomorrow."""

    recipe: Recipe  # with the texts that are read by default
    checkpoints: tuple[Checkpoint, ...]  # those that are read, with their files
    subjects: tuple[Subject, ...]
    texts: tuple[TextFile, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    local: str | None = None  # identifies what folders on this machine hold
    shipped: tuple[Checkpoint, ...] = ()  # quantized already


@dataclass(frozen=True)
class Pins:
    """What decides numbers beside the plan, equal in every process."""

    threads: int
    libraries: dict[str, str]
    numerics: int
    # Of each draw with the evaluation text, and of what searches choose on.
    text_sha256: tuple[str, ...]
    items_sha256: dict[str, str] = field(default_factory=dict)  # of each task


@dataclass(frozen=True)
class WorkUnit:
    """All passes of one subject in one round: never divided between processes."""

    passes: tuple[Pass, ...]

    @property
    def subject(self) -> Subject:
        return self.passes[0].subject

    @property
    def label(self) -> str:
        return self.subject.label

    @property
    def flops(self) -> float:
        return sum(step.price.flops for step in self.passes)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The members and what is read beside them, equal contents once."""
        members = [checkpoint for checkpoint, _ in self.subject.members]
        beside = [checkpoint for step in self.passes for checkpoint in step.beside]
        return tuple({c.content: c for c in (*members, *beside)}.values())

    @cached_property
    def content(self) -> str:
        """Identify the work by what is measured, under any label."""
        passes = [(p.schemes, p.full_precision, p.draw, p.perturbed) for p in self.passes]
        shipped = [checkpoint.content for step in self.passes for checkpoint in step.shipped]
        place = []
        settings = [c.settings_content for c in self.checkpoints if c.settings]
        place += [f"reference:{p.reference.content}" for p in self.passes if p.reference]
        place.append(digest(settings))
        return digest([self.subject.content, self.label, passes, shipped, *place])


@dataclass(frozen=True)
class Run:
    """A plan with its pins, as it is on disk for all processes."""

    plan: Plan
    pins: Pins

    @cached_property
    def identity(self) -> str:
        """Identify everything that the numbers of all units depend on."""
        plan = self.plan
        series = [(s.label, s.content) for s in plan.subjects] if plan.recipe.diagnostics else []
        decides = (plan.device.partition(":")[0], plan.dtype, plan.context, plan.column_loop)
        settings = (plan.recipe.diagnostics, plan.recipe.strata, plan.recipe.confidence)
        return digest([decides, settings, series, vars(self.pins)])


def work_of(plan: Plan) -> tuple[object, ...]:
    """Identify the work of a plan and what judges it: everything but its price."""
    units = tuple(unit.content for unit in units_of(plan.passes))
    decides = (plan.device, plan.dtype, plan.context, plan.column_loop)
    return (decides, units, plan.recipe, plan.otherwise is None)


def units_of(passes: Sequence[Pass]) -> tuple[WorkUnit, ...]:
    """Return passes by subject, in their order."""
    groups = groupby(passes, lambda one: one.subject)
    return tuple(WorkUnit(tuple(some)) for _, some in groups)


class Watch:
    """Receives progress; every method does nothing unless a subclass overrides it."""

    def subject(self, done: int, total: int, label: str) -> None:
        """A subject begins; with `done == total` all are done."""

    def block(self, done: int, total: int, what: str) -> None:
        """A subject is at this block; `what` names the work there."""

    def count(self, what: str, done: int, total: int) -> None:
        """So many are done of something that is counted, such as file trees."""

    def download(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        """A download has come this far; called from several threads."""

    def note(self, text: str) -> None:
        """A passing note, such as a retry or a wait; called from several threads."""


SILENT = Watch()
