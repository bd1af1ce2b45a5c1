"""A recipe resolved, and the whole audit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from qaudit.settings import Recipe
from qaudit.types.conclusions import (
    Comparison,
    Finding,
    MeasurementRow,
    Pick,
    TaskRow,
)
from qaudit.types.diagnostics import Diagnostics
from qaudit.types.policies import Verdict
from qaudit.types.subjects import Checkpoint, Subject, TextFile

PluginKind = Literal["scheme", "merge", "format", "diagnostic"]


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
        return Price(
            self.flops + other.flops,
            self.nbytes_read + other.nbytes_read,
            self.streams + other.streams,
        )


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
        return not (self.full_precision or self.is_quantized)

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


@dataclass(frozen=True)
class AuditRecord:
    """Everything that was planned, measured, skipped and concluded."""

    plan: Plan
    environment: dict[str, Any]
    protocol: dict[str, Any]
    subjects: tuple[Subject, ...]
    measurements: tuple[MeasurementRow, ...]
    tasks: tuple[TaskRow, ...]
    comparisons: tuple[Comparison, ...]
    findings: tuple[Finding, ...]
    pick: Pick | None
    skipped: tuple[Skipped, ...]
    verdict: Verdict | None = None  # None: nothing quantized was measured
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    schema: str = "1"
    qaudit: str = ""
    signature: Signature | None = None
