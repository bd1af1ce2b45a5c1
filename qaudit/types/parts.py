"""A plan that several processes measure: what they agree on, and the work in units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from qaudit.settings import Recipe
from qaudit.types.audit import Pass, Plan
from qaudit.types.conclusions import Finding
from qaudit.types.subjects import Checkpoint, Subject, TextFile, digest


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
    text_sha256: tuple[str, ...]  # of each draw of calibration text with the evaluation text
    items_sha256: dict[str, str] = field(default_factory=dict)  # of each task
    self_check: bool = False


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

    def expect(self, costs: Mapping[str, float]) -> None:
        """These subjects come, by label, with what each is planned to cost, in any unit."""

    def subject(self, done: int, total: int, label: str, passes: int = 1) -> None:
        """A subject begins, which takes so many passes; with `done == total` all are done."""

    def block(self, done: int, total: int, what: str) -> None:
        """A subject is at this block; `what` names the work there."""

    def count(self, what: str, done: int, total: int, left_seconds: float | None = None) -> None:
        """So many are done of something that is counted, such as file trees."""

    def download(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        """A download has come this far; called from several threads."""

    def note(self, text: str) -> None:
        """A passing note, such as a retry or a wait; called from several threads."""


SILENT = Watch()
