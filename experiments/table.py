"""The files of experiments: their keys, checked, and what they share.

Lengths are in units, and a size sets how many steps a unit has: one file describes the same
experiment for a minute, for a laptop and for a GPU. `common.yaml`, beside an experiment's file or
the shipped one, holds what experiments share: the sizes, of which an experiment may change single
keys, and the run with a held learning rate that most of them start from, so that it is the same
run and is trained once. A place on a run is written `held@8`: eight units in.

**The results** of an experiment are over seeds.

Documents bound how well one pair of models is compared. Only seeds vary the training, so that a
claim about training is judged by the interval over seeds, and one seed alone decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from experiments.document import LabDocument, read_document
from experiments.run import NotNegative
from experiments.shapes import Count, ModelShape, preset
from qaudit.core.registry import parse_scheme
from qaudit.errors import RecipeError, SchemeError
from qaudit.support.keys import as_list, nearest
from qaudit.types import FULL_PRECISION
from qaudit.types.rows import Interval

COMMON = "common.yaml"
FOLDER = Path(__file__).parent / "recipes"
SIZES = ("smoke", "cpu", "gpu")
_KIND = "an experiment"


class Keys(BaseModel):
    """A table of keys that refuses any other."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


def _scheme(text: str) -> str:
    try:
        return text if text == FULL_PRECISION else parse_scheme(text).short
    except SchemeError as error:
        raise ValueError(f"{error.message}; {error.hint}") from error


Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
Schemes = Annotated[tuple[Annotated[str, AfterValidator(_scheme)], ...], BeforeValidator(as_list)]
Positive = Annotated[float, Field(gt=0)]


class Size(Keys):
    """The size of an experiment: the model, the length of a unit, and the text of a scan."""

    model: str
    changes: dict[str, Any] = {}  # of the model's sizes
    batch: Count
    accumulate: Count = 1
    unit_steps: Count
    warmup_steps: Count
    peak: Positive
    weight_decay: NotNegative = 0.1
    schemes: Schemes
    evaluation_documents: Annotated[int, Field(strict=True, ge=2)]
    calibration_documents: Count
    document_tokens: Annotated[int, Field(strict=True, ge=2)]
    tokens_per_second: Positive  # expected on the hardware of this size; the price uses it
    seconds_per_measurement: Positive
    attention: Literal["sdpa", "eager"] = "sdpa"

    def shape(self) -> ModelShape:
        return preset(self.model, **self.changes)

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        try:
            self.shape()
        except ValueError as error:
            raise ValueError(f"`{self.model}` with {self.changes} is no model: {error}") from error
        return self

    def steps(self, units: float) -> int:
        return round(units * self.unit_steps)

    def label(self, place: str) -> str:
        name, units = place_of(place)
        return f"{name}-step{self.steps(units)}"


class RunTable(Keys):
    """One run: a schedule over some units, from the start or from a place on an earlier run."""

    name: Name
    units: Positive
    start: str | None = Field(default=None, alias="from")
    schedule: dict[str, Any]
    save_every: Positive | None = None  # besides every place that is named
    states: tuple[Positive, ...] = ()  # where others may start from, besides the end
    peak: Positive | None = None
    weight_decay: NotNegative | None = None
    sam: NotNegative | None = None


class SoupTable(Keys):
    """A mean of checkpoints along a run, formed while it is measured."""

    label: Name
    merge: str = "mean"
    of: Annotated[tuple[str, ...], Field(min_length=2)]


class ContrastTable(Keys):
    """Two models that differ in one thing: `a` minus `b`, under some schemes."""

    claim: str
    says: str
    a: str
    b: str
    measure: Measure = "error"
    schemes: Schemes
    expect: Expectation | None = None
    margin: NotNegative = 0.0

    @model_validator(mode="after")
    def _is_a_comparison(self) -> Self:
        is_of_full_precision = self.measure in ("loss", "trace")
        if not is_of_full_precision and FULL_PRECISION in self.schemes:
            raise ValueError(f"`{FULL_PRECISION}` loses nothing to quantization; measure its loss")
        if self.measure == "trace" and self.schemes != (FULL_PRECISION,):
            raise ValueError(f"a trace is of full precision: `schemes: [{FULL_PRECISION}]`")
        if (self.expect == "near") != (self.margin > 0):
            raise ValueError("`near` needs a margin, and a margin needs `expect: near`")
        return self


class Common(Keys):
    """What experiments share."""

    sizes: dict[str, Size]
    runs: tuple[RunTable, ...] = ()


class Experiment(Keys):
    """The keys of an experiment, laid over those of `common.yaml`."""

    name: Name
    description: str
    sizes: dict[str, Size]
    runs: tuple[RunTable, ...]
    scan: Annotated[tuple[str, ...], Field(min_length=1)]
    soups: tuple[SoupTable, ...] = ()
    claims: tuple[Claim, ...] = ()
    contrasts: tuple[ContrastTable, ...] = ()
    sources: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _refers_to_what_exists(self) -> Self:
        _check_names("run", [run.name for run in self.runs])
        _check_names("subject", [*self.scan, *(soup.label for soup in self.soups)])
        for number, run in enumerate(self.runs):
            if run.start is not None:
                _check_place(run.start, self.runs[:number], to_start=True)
        for place in (*self.scan, *(place for soup in self.soups for place in soup.of)):
            _check_place(place, self.runs)
        claims = [claim.name for claim in self.claims]
        subjects = [*self.scan, *(soup.label for soup in self.soups)]
        for contrast in self.contrasts:
            _check_known(contrast.claim, claims, f"there is no claim `{contrast.claim}`")
            for subject in (contrast.a, contrast.b):
                _check_known(subject, subjects, f"`{subject}` is compared and not scanned")
        for name, size in self.sizes.items():
            for place in self.places():
                if not (place_of(place)[1] * size.unit_steps + 1e-9) % 1 < 1e-6:
                    raise ValueError(
                        f"`{place}` is no whole step at size `{name}`; "
                        f"a unit has {size.unit_steps} steps there"
                    )
        return self

    def contrasts_by_scheme(self) -> tuple[Contrast, ...]:
        return tuple(
            Contrast(scheme=scheme, **contrast.model_dump(exclude={"schemes"}))
            for contrast in self.contrasts
            for scheme in contrast.schemes
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
    match = re.fullmatch(r"([a-z][a-z0-9-]*)@([0-9]+(?:\.[0-9]+)?)", text)
    if match is None:
        raise ValueError(
            f"`{text}` is no place on a run; write `held@8` for eight units into `held`"
        )
    return match[1], float(match[2])


def _check_known(name: str, known: Collection[str], sentence: str) -> None:
    if name not in known:
        raise ValueError(f"{sentence}; {nearest(name, known)}")


def _check_names(what: str, names: list[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two {what}s are named `{twice[0]}`; give each its own name")


def _check_place(text: str, runs: tuple[RunTable, ...], *, to_start: bool = False) -> None:
    name, units = place_of(text)
    by_name = {run.name: run for run in runs}
    _check_known(name, by_name, f"`{text}` is on no earlier run")
    run = by_name[name]
    if not 0 < units <= run.units:
        raise ValueError(f"`{text}` is past the end of `{name}`; it has {run.units:g} units")
    if to_start and units not in (*run.states, run.units):
        places = ", ".join(f"{place:g}" for place in (*run.states, run.units))
        raise ValueError(f"no run can start at `{text}`; `{name}` keeps its state at {places}")


def shipped_experiments() -> dict[str, str]:
    paths = sorted(p for p in FOLDER.glob("*.yaml") if p.name != COMMON)
    tables = {path.stem: read_document(path, _KIND).table for path in paths}
    return {name: str(table.get("description", "")) for name, table in tables.items()}


def read_experiment(name: str, settings: Sequence[str] = ()) -> Experiment:
    """Return an experiment by its name or file, with `--set` laid over it."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise RecipeError(
            f"there is no experiment `{name}`", hint=nearest(path.stem, shipped_experiments())
        )
    common_path = path.parent / COMMON
    if not common_path.is_file():
        common_path = FOLDER / COMMON
    common_file = read_document(common_path, _KIND)
    common = common_file.check(Common, common_file.table)
    document = read_document(path, _KIND, settings)
    return document.check(Experiment, _laid_over(common, document, path.stem))


def _laid_over(common: Common, document: LabDocument, name: str) -> dict[str, Any]:
    """Return the keys of an experiment: its runs follow the shared ones, its sizes change keys."""
    table = document.table
    sizes, runs = table.get("sizes", {}), table.get("runs", [])
    if not isinstance(sizes, dict) or not isinstance(runs, list):
        return table  # `check` refuses it by name
    for size, changes in sizes.items():
        if size not in common.sizes:
            hint = nearest(str(size), common.sizes)
            raise document.refuse(f"there is no size `{size}`", hint, ("sizes", size))
        if not isinstance(changes, dict):
            sentence = f"`sizes.{size}` is `{changes}`"
            raise document.refuse(sentence, "it must be a table", ("sizes", size))
    laid = {key: {**size.model_dump(), **sizes.get(key, {})} for key, size in common.sizes.items()}
    shared = [run.model_dump(by_alias=True) for run in common.runs]
    return {"name": name, **table, "sizes": laid, "runs": [*shared, *runs]}


Measure = Literal["error", "lost", "loss", "kl", "trace"]
"""Relative error, what quantization adds in nats, the loss itself in nats per token, KL from full
precision in nats per token, or the logarithm of the Hessian's trace in full precision."""

Expectation = Literal["higher", "lower", "near"]
"""The sign or size of `a` minus `b` that a study suggests."""

Standing = Literal["agrees", "disagrees", "inconclusive", "open", "too wide", "not measured"]
"""A contrast against its expectation; `open` where no study has one, `too wide` where a margin is
larger than both of the errors that it bounds: it could not come out otherwise."""


@dataclass(frozen=True)
class Claim:
    """A sentence of a study that an experiment tests."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - it is a key of experiment files

    name: str
    source: str
    says: str


@dataclass(frozen=True)
class Contrast:
    """Two models that differ in one thing, compared as `a` minus `b` under a scheme."""

    claim: str
    says: str
    a: str
    b: str
    measure: Measure
    scheme: str
    expect: Expectation | None = None
    margin: float = 0.0  # within which `near` agrees


@dataclass(frozen=True)
class SeedEstimate:
    """A contrast in the models of one seed, with the interval over documents."""

    seed: int
    interval: Interval


@dataclass(frozen=True)
class ContrastResult:
    """A contrast over all seeds; the interval is over seeds, and none with fewer than two."""

    contrast: Contrast
    seeds: tuple[SeedEstimate, ...]
    interval: Interval | None
    standing: Standing


@dataclass(frozen=True)
class SeedPoint:
    """One model of one seed under one scheme."""

    seed: int
    subject: str
    scheme: str
    loss: float  # in full precision, nats per token
    quantized: float
    interval: Interval  # of the relative error, over documents


@dataclass(frozen=True)
class ExperimentSummary:
    """An experiment at one size, over all seeds that were measured."""

    experiment: str
    size: str
    description: str
    command: str
    seeds: tuple[int, ...]
    parameters: int
    tokens: int  # trained on per seed
    documents: int
    confidence: float
    subjects: tuple[str, ...]
    claims: tuple[Claim, ...]
    results: tuple[ContrastResult, ...]
    points: tuple[SeedPoint, ...]
    environment: dict[str, str]
    notes: tuple[str, ...] = ()
