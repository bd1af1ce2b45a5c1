"""The keys of an experiment's file, each checked and every wrong one named.

Lengths are in units, and a size says how many steps a unit has: one file describes the same
experiment for a minute, for a laptop and for a GPU. What several experiments share stands in
`common.yaml`: the sizes, and the run with a held learning rate that most of them start from, so
that it is the same run, and is trained once. A place on a run is written `held@8`: eight units in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from qaudit.core.keys import nearest
from qaudit.core.registry import parse_scheme
from qaudit.errors import SchemeError, UsageError
from qaudit.types import FULL_PRECISION

if TYPE_CHECKING:
    from qaudit.lab.shapes import Shape

SIZES = ("smoke", "cpu", "gpu")
_NAME = re.compile(r"[a-z][a-z0-9-]*")


class Table(BaseModel):
    """A table of keys that refuses any other."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"`{value}` is no name; write it in small letters, digits and hyphens")
    return value


def _scheme(text: str) -> str:
    try:
        return text if text == FULL_PRECISION else parse_scheme(text).short
    except SchemeError as error:
        raise ValueError(f"{error.message}; {error.hint}") from error


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


Name = Annotated[str, AfterValidator(_name)]
Schemes = Annotated[tuple[Annotated[str, AfterValidator(_scheme)], ...], BeforeValidator(_as_list)]
Count = Annotated[int, Field(strict=True, ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Size(Table):
    """How large an experiment is: the model, the length of a unit, and what is measured on."""

    model: str
    changes: dict[str, Any] = {}  # of the model's sizes
    batch: Count
    accumulate: Count = 1
    unit_steps: Count
    warmup_steps: Count
    peak: Positive
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    schemes: Schemes
    evaluation_documents: Annotated[int, Field(strict=True, ge=2)]
    calibration_documents: Count
    document_tokens: Annotated[int, Field(strict=True, ge=2)]
    tokens_per_second: Positive  # about, where this size is meant for: what a price is made of
    seconds_per_measurement: Positive
    attention: Literal["sdpa", "eager"] = "sdpa"

    @property
    def context(self) -> int:
        """Tokens of a window."""
        return self.shape().context

    def shape(self) -> Shape:
        """Return the model."""
        from qaudit.lab.shapes import preset  # imports torch, which names need not

        try:
            return preset(self.model, **self.changes)
        except (TypeError, UsageError) as error:
            raise ValueError(f"`{self.model}` with {self.changes} is no model: {error}") from error

    @model_validator(mode="after")
    def _can_be_built(self) -> Size:
        self.shape()
        return self


class RunTable(Table):
    """One run: a schedule over some units, from the start or from a place on an earlier run."""

    name: Name
    units: Positive
    start: str | None = Field(default=None, alias="from")
    schedule: dict[str, Any]
    save_every: Positive | None = None  # beside every place that is named
    states: tuple[Positive, ...] = ()  # where others may start from, beside the end
    peak: Positive | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    sam: Annotated[float, Field(ge=0)] | None = None


class SoupTable(Table):
    """A mean of checkpoints along a run, made while it is measured."""

    label: Name
    merge: str = "mean"
    of: Annotated[tuple[str, ...], Field(min_length=2)]


class ClaimTable(Table):
    """A sentence of a study, and where it stands."""

    name: Name
    source: str
    says: str


class ContrastTable(Table):
    """Two models that differ in one thing: `a` minus `b`, under some schemes."""

    claim: str
    says: str
    a: str
    b: str
    measure: Literal["error", "lost", "loss"] = "error"
    schemes: Schemes
    expect: Literal["higher", "lower", "near"] | None = None
    margin: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _has_something_to_compare(self) -> ContrastTable:
        if self.measure != "loss" and FULL_PRECISION in self.schemes:
            raise ValueError(f"`{FULL_PRECISION}` loses nothing to quantization; measure its loss")
        if (self.expect == "near") != (self.margin > 0):
            raise ValueError("`near` needs a margin, and a margin needs `expect: near`")
        return self


class Common(Table):
    """What experiments share."""

    sizes: dict[str, Size]
    runs: tuple[RunTable, ...] = ()


class Experiment(Table):
    """Everything an experiment's file says, with what it shares already laid under it."""

    name: Name
    description: str
    sizes: dict[str, Size]
    runs: tuple[RunTable, ...]
    scan: Annotated[tuple[str, ...], Field(min_length=1)]
    soups: tuple[SoupTable, ...] = ()
    claims: tuple[ClaimTable, ...] = ()
    contrasts: tuple[ContrastTable, ...] = ()
    sources: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _says_what_it_means(self) -> Experiment:
        _check_names("run", [run.name for run in self.runs])
        _check_names("subject", [*self.scan, *(soup.label for soup in self.soups)])
        for number, run in enumerate(self.runs):
            if run.start is not None:
                _check_place(run.start, self.runs[:number], to_start=True)
        for place in (*self.scan, *(place for soup in self.soups for place in soup.of)):
            _check_place(place, self.runs)
        self._check_contrasts()
        self._check_steps()
        return self

    def _check_contrasts(self) -> None:
        claims = [claim.name for claim in self.claims]
        subjects = [*self.scan, *(soup.label for soup in self.soups)]
        for contrast in self.contrasts:
            if contrast.claim not in claims:
                raise ValueError(
                    f"there is no claim `{contrast.claim}`; {nearest(contrast.claim, claims)}"
                )
            for subject in (contrast.a, contrast.b):
                if subject not in subjects:
                    raise ValueError(
                        f"`{subject}` is compared and not scanned; {nearest(subject, subjects)}"
                    )

    def _check_steps(self) -> None:
        for name, size in self.sizes.items():
            for place in self.places():
                units = place_of(place)[1]
                if not (units * size.unit_steps + 1e-9) % 1 < 1e-6:
                    raise ValueError(
                        f"`{place}` is no whole step at size `{name}`; "
                        f"a unit has {size.unit_steps} steps there"
                    )

    def places(self) -> Iterator[str]:
        """Yield every place on a run that the experiment needs, some of them more than once."""
        yield from (run.start for run in self.runs if run.start is not None)
        yield from self.scan
        yield from (place for soup in self.soups for place in soup.of)
        for run in self.runs:
            yield from (f"{run.name}@{units:g}" for units in (*run.states, run.units))
            if run.save_every is not None:
                count = int(run.units / run.save_every + 1e-9)
                yield from (f"{run.name}@{k * run.save_every:g}" for k in range(1, count + 1))


def place_of(text: str) -> tuple[str, float]:
    """Read `held@8` as a run and units on it."""
    match = re.fullmatch(r"([a-z][a-z0-9-]*)@([0-9]+(?:\.[0-9]+)?)", text)
    if match is None:
        raise ValueError(f"`{text}` is no place on a run; write `held@8`, eight units in")
    return match[1], float(match[2])


def _check_names(what: str, names: list[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two {what}s are called `{twice[0]}`; give each a name of its own")


def _check_place(text: str, runs: tuple[RunTable, ...], *, to_start: bool = False) -> None:
    name, units = place_of(text)
    known = {run.name: run for run in runs}
    if name not in known:
        raise ValueError(f"`{text}` is on no run that stands before it; {nearest(name, known)}")
    run = known[name]
    if not 0 < units <= run.units:
        raise ValueError(f"`{text}` is past the end of `{name}`; it has {run.units:g} units")
    if to_start and units not in (*run.states, run.units):
        places = ", ".join(f"{place:g}" for place in (*run.states, run.units))
        raise ValueError(f"no run can start at `{text}`; `{name}` keeps its state at {places}")
