"""The tables of a family's file, one class each: their keys and values."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from qaudit.core.schedules import Schedule, build
from qaudit.support.keys import as_list
from qaudit.support.patterns import slow_reason


class Strict(BaseModel):
    """A table that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Inferred(BaseModel):
    """Whether a table was read in a source or inferred, and the reason."""

    verified: bool = True
    reason: str | None = None

    def doubt(self, sentence: str) -> tuple[str, ...]:
        """Return the sentence and its reason, or nothing when the table is verified."""
        if self.verified:
            return ()
        return (f"{sentence}: {self.reason}" if self.reason else sentence,)


class Ramp(Strict, Inferred):
    """The tokens of a step, from a step on: batches grow during some runs."""

    from_step: int = 0
    tokens: int


Ramps = Annotated[
    tuple[Ramp, ...],
    BeforeValidator(lambda one: ({"tokens": one},) if isinstance(one, int) else as_list(one)),
]


class LearningRate(Inferred):
    """A schedule, the unit its counter runs in, and where it was in force.

    Of several, the first that holds for a checkpoint's ingredient and step is taken.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str
    units: Literal["steps", "tokens", "samples"] = "steps"
    until_step: int | None = None
    ingredients: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _can_be_built(self) -> LearningRate:
        self.schedule()
        return self

    def schedule(self) -> Schedule:
        return build(self.kind, **{k: _number(k, v) for k, v in (self.model_extra or {}).items()})

    def holds(self, ingredient: int | None, step: int) -> bool:
        if self.ingredients is not None and ingredient not in self.ingredients:
            return False
        return self.until_step is None or step <= self.until_step


def _number(key: str, value: object) -> Any:
    """Read `5.0e12` and `5e12` alike: YAML takes the second for a text."""
    if not isinstance(value, str) or key == "shape":
        return value
    if re.fullmatch(r"[-+]?[0-9]+(\.[0-9]*)?(e[-+]?[0-9]{1,3})?", value, re.I):
        return float(value)
    raise ValueError(f"`{key}` is `{value}`, which is no number")


class Index(Strict):
    """How a counted checkpoint becomes a step: `step = (index + offset) * steps`."""

    steps: int
    offset: int = 0


class Stage(Strict):
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
    def _is_consistent(self) -> Stage:
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


_LONGEST_PATTERN = 500
_GROUPS = {"stage", "ingredient", "step", "tokens", "unit", "index", "variant", "thousands"}


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a stage's pattern once, or refuse it; `\\d` is an ASCII digit."""
    shown = pattern if len(pattern) <= 60 else f"{pattern[:57]}..."
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"`{shown}` is longer than {_LONGEST_PATTERN} characters; shorten it")
    try:
        regex = re.compile(pattern, re.ASCII)
        reason = slow_reason(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"`{shown}` is not a regular expression: {error}") from error
    if reason:
        raise ValueError(f"`{shown}` could take hours on a long name: {reason}; write it without")
    return regex


class Named(Strict, Inferred):
    """The place of a checkpoint without a number in its name.

    One without a step comes after those with one, in the order of the file.
    """

    name: str
    repo: str | None = None  # where only one of the family's repositories means this by it
    stage: str | None = None
    ingredient: int | None = None
    step: int | None = None


class FamilySoup(Strict, Inferred):
    """A soup as its makers document it.

    `target` is the revision that should equal it, as `owner/name@revision` in another repository.
    """

    label: str
    merge: str = "mean"
    of: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    target: str | None = None

    @model_validator(mode="after")
    def _has_a_weight_for_each_member(self) -> FamilySoup:
        if self.weights is not None and len(self.weights) != len(self.of):
            raise ValueError(f"{len(self.weights)} weights for {len(self.of)} members")
        return self


class Duplicates(Strict, Inferred):
    """Revisions with the same weights, or reported to have them; a bare list of names will do."""

    revisions: tuple[str, ...]
    repo: str | None = None
    source: str | None = None


DuplicatesOrNames = Annotated[
    Duplicates,
    BeforeValidator(lambda one: {"revisions": one} if isinstance(one, list | tuple) else one),
]


class KnownBad(Strict):
    """Revisions, by name or glob, whose weights do not match their names.

    `some` means that only some of them are bad, unknown which: hashes must decide.
    """

    revisions: tuple[str, ...]
    reason: str
    some: bool = False
    repo: str | None = None
    source: str | None = None


class Match(Strict):
    """What belongs to the family: repositories by glob, and their architecture.

    `reads` are regular expressions that search a repository's name; their groups are
    parameters of the schedule, which the name then overrides.
    """

    repos: tuple[str, ...] = ()
    model_type: str | None = None
    reads: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _can_be_searched(self) -> Match:
        for pattern in self.reads:
            compiled(pattern)
        return self
