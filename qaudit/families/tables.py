"""The tables of a family's file, one class each: their keys, and what may stand there."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from qaudit.core.schedules import Schedule, build


class Table(BaseModel):
    """A table of keys that refuses any other."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def as_list(value: object) -> object:
    """Let one thing stand for a list of one."""
    return value if isinstance(value, list | tuple) else [value]


class Ramp(Table):
    """The tokens of a step, from a step on: batches grow during some runs."""

    from_step: int = 0
    tokens: int


def _as_ramps(value: object) -> object:
    return ({"tokens": value},) if isinstance(value, int) else value


Ramps = Annotated[tuple[Ramp, ...], BeforeValidator(_as_ramps)]


class LearningRate(BaseModel):
    """A schedule, the unit its counter runs in, and up to which step it was in force."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str
    units: Literal["steps", "tokens", "samples"] = "steps"
    until_step: int | None = None
    verified: bool = True

    @model_validator(mode="after")
    def _can_be_built(self) -> LearningRate:
        self.schedule()
        return self

    def schedule(self) -> Schedule:
        """Return the schedule as a function of its counter."""
        return build(self.kind, **{k: _number(v) for k, v in (self.model_extra or {}).items()})


def _number(value: object) -> Any:
    """Read `5.0e12` and `5e12` alike: YAML takes the second for a text."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+e[-+]?[0-9]+", value, re.I):
        return float(value)
    return value


class Index(Table):
    """How a counted checkpoint becomes a step: `step = (index + offset) * steps`."""

    steps: int
    offset: int = 0


class Stage(Table):
    """One stage of a run: its names, its learning rate, where it starts and ends."""

    name: str
    pattern: str | None = None
    lr: Annotated[tuple[LearningRate, ...], BeforeValidator(as_list)] = ()
    starts_after: str | None = None
    end_step: int | None = None
    tokens_per_step: Ramps | None = None
    tokens_per_sample: int | None = None
    index: Index | None = None

    @model_validator(mode="after")
    def _says_what_it_means(self) -> Stage:
        unknown = set(compiled(self.pattern or "").groupindex) - _GROUPS
        if unknown:
            raise ValueError(
                f"the pattern names groups {sorted(unknown)}; known are {sorted(_GROUPS)}"
            )
        if self.starts_after is not None and not re.fullmatch(r".+@[0-9]+", self.starts_after):
            raise ValueError("`starts_after` is a stage and a step, such as `stage1@5000`")
        if self.tokens_per_sample is None and any(lr.units == "samples" for lr in self.lr):
            raise ValueError("a schedule in samples needs `tokens_per_sample` beside it")
        return self


_GROUPS = {"stage", "ingredient", "step", "tokens", "unit", "index", "variant", "thousands"}


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a stage's pattern once, or refuse it."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"`{pattern}` is not a regular expression: {error}") from error


class Named(Table):
    """Where a checkpoint without a number in its name stands."""

    name: str
    stage: str | None = None
    ingredient: int | None = None
    step: int | None = None
    verified: bool = True


class FamilySoup(Table):
    """A soup as its makers document it; `target` is the revision said to hold it."""

    label: str
    merge: str = "mean"
    of: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    target: str | None = None
    verified: bool = True


class KnownBad(Table):
    """A revision that does not hold what its name says."""

    revisions: tuple[str, ...]
    reason: str
    source: str | None = None


class Match(Table):
    """What belongs to the family: repositories by glob, and their architecture."""

    repos: tuple[str, ...] = ()
    model_type: str | None = None
