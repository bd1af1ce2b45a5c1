"""One training run as a value: everything that changes its weights, and what it leaves behind.

`Run.key` identifies the weights: two runs of one key have the same weights at every step that
both reach, whatever they are called and wherever they stop. How far a run goes, what it is called
and which of its steps are written are therefore no part of it; what it forks from is, to the very
beginning. The text is not: its own key stands beside this one wherever a run is kept.

A schedule counts the steps of its own run from 1. The fork of a run begins at its step 1 again,
with the weights and the optimizer's state of `parent` at `fork_at` and an order of the data and a
schedule of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qaudit.core.schedules import Schedule, build, spell
from qaudit.errors import UsageError
from qaudit.lab.shapes import Shape
from qaudit.types import digest

PRECISIONS = ("bf16", "fp32")
ATTENTIONS = ("sdpa", "eager")

_FREE = ("name", "steps", "save_at", "keep_at")  # what may change without changing weights


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: everything that changes its weights."""

    name: str
    shape: Shape
    schedule: Schedule
    steps: int
    save_at: tuple[int, ...]
    batch: int  # windows of a step
    seed: int  # of the first weights
    order: int | None = None  # seed of the order of the data; `seed` if not given
    accumulation: int = 1  # parts that a batch is computed in
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # the norm that gradients are cut down to
    sam_rho: float = 0.0  # radius of sharpness-aware minimization; 0 is none
    ema_decay: float = 0.0  # of the average from step to step; 0 is none
    lawa: tuple[int, int] | None = None  # a window of so many weights, so many steps apart
    precision: str = "bf16"  # of the arithmetic; weights are held in fp32
    attention: str = "sdpa"  # as transformers calls it; `eager` is faster on CPUs
    parent: Run | None = None
    fork_at: int = 0
    keep_at: tuple[int, ...] = ()  # steps whose whole state is kept, to fork from

    def __post_init__(self) -> None:
        """Refuse what cannot be run, each wrong value with what is allowed."""
        if wrong := list(_wrong(self)):
            raise UsageError(
                f"run `{self.name}` cannot be: {'; '.join(wrong)}", hint="mend what is named"
            )

    @property
    def context(self) -> int:
        """Tokens of a window."""
        return self.shape.context

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step is trained on."""
        return self.batch * self.shape.context

    @property
    def averages(self) -> tuple[str, ...]:
        """Name the averages that are saved beside its checkpoints."""
        asked = {"ema": bool(self.ema_decay), "lawa": self.lawa is not None}
        return tuple(name for name, is_asked in asked.items() if is_asked)

    @property
    def key(self) -> str:
        """Identify the weights that this run comes to, on one text."""
        table = {k: v for k, v in self.table().items() if k not in _FREE}
        table["order"] = self.seed if self.order is None else self.order
        if self.parent is not None:
            del table["seed"]  # its first weights are the parent's
            table["parent"] = self.parent.key
        return digest(table)

    def label(self, step: int, average: str = "") -> str:
        """Return the folder name of the checkpoint at `step`, or of an average there."""
        return f"{self.name}{'-' if average else ''}{average}-step{step}"

    def table(self) -> dict[str, Any]:
        """Return everything as JSON has it; `run_of` reads it again."""
        table = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        table["shape"] = dataclasses.asdict(self.shape)
        table["schedule"] = spell(self.schedule)
        table["parent"] = self.parent.table() if self.parent else None
        return {k: list(v) if isinstance(v, tuple) else v for k, v in table.items()}


def run_of(table: Mapping[str, Any]) -> Run:
    """Read a run from its table."""
    read = dict(table)
    read["shape"] = Shape(**read["shape"])
    read["schedule"] = build(**read["schedule"])
    read["parent"] = run_of(read["parent"]) if read["parent"] else None
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in read.items()}
    return Run(**fields)


def differences(was: Run, now: Run) -> list[str]:
    """Return, for each setting that changes weights and differs, what it was and what it is."""
    before, after = dict(_settings(was)), dict(_settings(now))
    return [
        f"`{name}` was {before.get(name)} and is {after.get(name)}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _settings(run: Run) -> Iterator[tuple[str, object]]:
    table = {k: v for k, v in run.table().items() if k not in _FREE}
    table["order"] = run.seed if run.order is None else run.order
    table["parent"] = f"{run.parent.name} ({run.parent.key[:12]})" if run.parent else None
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


# ------------------------------------------------------------------------------ what is allowed


def _wrong(run: Run) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run.name):
        yield f"`name` is `{run.name}` (letters, digits, `-`, `_` and `.`)"
    for name, least in (("steps", 1), ("batch", 1), ("accumulation", 1), ("seed", 0)):
        if getattr(run, name) < least:
            yield f"`{name}` is {getattr(run, name)} (at least {least})"
    if run.accumulation > 0 and run.batch % run.accumulation:
        yield f"`accumulation` is {run.accumulation} (a divisor of the batch of {run.batch})"
    for name in ("save_at", "keep_at"):
        if outside := [step for step in getattr(run, name) if not 1 <= step <= run.steps]:
            yield f"`{name}` holds {outside[0]} (from 1 to the {run.steps} steps)"
    yield from _wrong_optimizer(run)
    yield from _wrong_averages(run)
    if run.precision not in PRECISIONS:
        yield f"`precision` is `{run.precision}` (one of {', '.join(PRECISIONS)})"
    if run.attention not in ATTENTIONS:
        yield f"`attention` is `{run.attention}` (one of {', '.join(ATTENTIONS)})"
    yield from _wrong_fork(run)


def _wrong_optimizer(run: Run) -> Iterator[str]:
    if not 0 < run.schedule.peak < float("inf"):
        yield f"`peak` is {run.schedule.peak:g} (above 0)"
    if run.weight_decay < 0:
        yield f"`weight_decay` is {run.weight_decay:g} (at least 0)"
    if not all(0 <= beta < 1 for beta in run.betas):
        yield f"`betas` is {run.betas} (each from 0 to below 1)"
    if not run.clip > 0:
        yield f"`clip` is {run.clip:g} (above 0)"
    if run.sam_rho < 0:
        yield f"`sam_rho` is {run.sam_rho:g} (at least 0)"


def _wrong_averages(run: Run) -> Iterator[str]:
    if not 0 <= run.ema_decay < 1:
        yield f"`ema_decay` is {run.ema_decay:g} (from 0 to below 1)"
    if run.lawa is None:
        return
    window, every = run.lawa
    if window < 2 or every < 1:
        yield f"`lawa` is {window} every {every} (at least 2, every 1 or more)"
    elif not any(step % every == 0 and step >= window * every for step in run.save_at):
        yield (
            f"`lawa` is {window} every {every} (so that a saved step is a multiple of {every} "
            f"from {window * every} on)"
        )


def _wrong_fork(run: Run) -> Iterator[str]:
    if run.parent is None:
        if run.fork_at:
            yield f"`fork_at` is {run.fork_at} (0 without a parent)"
        return
    if run.fork_at < 1:
        yield f"`fork_at` is {run.fork_at} (a step of `{run.parent.name}`, from 1 on)"
    if run.parent.shape != run.shape:
        yield f"`shape` is not that of `{run.parent.name}` (a fork keeps it)"
    if run.parent.name == run.name:
        yield f"`name` is `{run.name}` (another than that of its parent)"
