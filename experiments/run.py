"""One training run as a value: everything that changes its weights, and what it leaves behind.

`Run.key` identifies the weights: two runs with one key have the same weights at every step that
both reach, whatever their names and lengths. The name, the number of steps and the steps that are
saved are therefore no part of it; the parent of a fork is, with its own parents. The text is not:
its key is recorded beside this one.

A schedule counts the steps of its own run from 1. A fork begins at its step 1 again, with the
weights and the optimizer's state of `parent` at `fork_at`, and its own data order and schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from experiments.document import STRICT
from experiments.shapes import Count, ModelShape
from qaudit.core.schedules import KINDS, Schedule, build
from qaudit.types import digest

Steps = tuple[Count, ...]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(strict=True, ge=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

_FREE = ("name", "steps", "save_at", "keep_at")  # may change without changing weights


def spell(schedule: Schedule) -> dict[str, float | str]:
    """Return the table that `build` makes the schedule from: its kind and its parameters."""
    kind = next(kind for kind, cls in KINDS.items() if cls is type(schedule))
    return {"kind": kind, **{f.name: getattr(schedule, f.name) for f in fields(schedule)}}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Training:
    """How steps are computed: the fields that a run shares with its configuration."""

    batch: Count = 32  # windows per step
    seed: Seed = 1  # of the first weights
    order: Seed | None = None  # seed of the data order; by default `seed`
    weight_decay: NotNegative = 0.1
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    clip: Annotated[float, Field(gt=0)] = 1.0  # the norm that gradients are clipped to
    sam_rho: NotNegative = 0.0  # radius of sharpness-aware minimization; 0 is none
    ema_decay: Fraction = 0.0  # of the average from step to step; 0 is none
    lawa: tuple[Annotated[int, Field(ge=2)], Count] | None = None  # window, steps between weights
    precision: Literal["bf16", "fp32"] = "bf16"  # of the arithmetic; weights are held in fp32


def schedule_of(
    kind: str, rates: Mapping[str, Any], *, peak: float, warmup: float, end: float
) -> Schedule:
    """Build a schedule; what its keys leave out follows from the run."""
    ends = {"end": end} if kind in ("cosine", "linear", "oli") else {}
    return build(kind, **{"peak": peak, "warmup": warmup, **ends, **rates})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingRun(Training):
    """One training run: everything that changes its weights."""

    name: Name
    shape: ModelShape
    schedule: Annotated[
        Schedule, BeforeValidator(lambda value: build(**value) if type(value) is dict else value)
    ]
    steps: Count
    save_at: Steps
    keep_at: Steps = ()  # steps whose whole state is kept, to fork from
    accumulation: Count = 1  # parts that a batch is computed in
    attention: Literal["sdpa", "eager"] = "sdpa"  # the names of transformers; `eager` suits CPUs
    parent: TrainingRun | None = None
    fork_at: int = 0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if wrong := list(_contradictions(self)):
            raise ValueError(", and ".join(wrong))
        return self

    @property
    def context(self) -> int:
        return self.shape.context

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.shape.context

    @property
    def averages(self) -> tuple[str, ...]:
        present = {"ema": self.ema_decay > 0, "lawa": self.lawa is not None}
        return tuple(name for name, is_present in present.items() if is_present)

    @property
    def data_seed(self) -> int:
        return self.seed if self.order is None else self.order

    @property
    def key(self) -> str:
        """Identify the weights that this run leads to, on one text."""
        table = {k: v for k, v in self.table().items() if k not in _FREE}
        table["order"] = self.data_seed
        if self.parent is not None:
            del table["seed"]  # its first weights are the parent's
            table["parent"] = self.parent.key
        return digest(table)

    def label(self, step: int, average: str = "") -> str:
        return f"{self.name}{'-' if average else ''}{average}-step{step}"

    def table(self) -> dict[str, Any]:
        """Return the fields as JSON has them; `Run(**table)` builds the run again."""
        table = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        table["shape"] = dataclasses.asdict(self.shape)
        table["schedule"] = spell(self.schedule)
        table["parent"] = self.parent.table() if self.parent else None
        return {k: list(v) if isinstance(v, tuple) else v for k, v in table.items()}


def _contradictions(run: TrainingRun) -> Iterator[str]:
    if run.batch % run.accumulation:
        yield f"`accumulation` is {run.accumulation} and must divide the batch of {run.batch}"
    for name in ("save_at", "keep_at"):
        if late := [step for step in getattr(run, name) if step > run.steps]:
            yield f"`{name}` has {late[0]}, and the run has {run.steps} steps"
    if not 0 < run.schedule.peak < float("inf"):
        yield f"`peak` is {run.schedule.peak:g} and must be above 0"
    window, every = run.lawa or (0, 1)
    if run.lawa and not any(s % every == 0 and s >= window * every for s in run.save_at):
        yield (
            f"`lawa` is {window} weights {every} steps apart, and no saved step is a multiple "
            f"of {every} from {window * every} on"
        )
    if run.parent is None:
        if run.fork_at:
            yield f"`fork_at` is {run.fork_at} and must be 0 without a parent"
        return
    if run.fork_at < 1:
        yield f"`fork_at` is {run.fork_at} and must be a step of `{run.parent.name}`"
    if run.parent.shape != run.shape:
        yield f"the model differs from that of `{run.parent.name}`, and a fork keeps it"
    if run.parent.name == run.name:
        yield f"`name` is `{run.name}` and must differ from its parent's"


def differences(before: TrainingRun, after: TrainingRun) -> list[str]:
    """Return a phrase for each setting that changes weights and differs."""
    old, new = dict(_settings(before)), dict(_settings(after))
    return [
        f"`{name}` was {old.get(name)} and is {new.get(name)}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _settings(run: TrainingRun) -> Iterator[tuple[str, object]]:
    table = {k: v for k, v in run.table().items() if k not in _FREE}
    table["order"] = run.data_seed
    table["parent"] = f"{run.parent.name} ({run.parent.key[:12]})" if run.parent else None
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value
