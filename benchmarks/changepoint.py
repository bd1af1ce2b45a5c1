"""How often a change point is found where there is none, and where there is one.

    python -m benchmarks.changepoint [TRIALS]

Each trial draws a series: a relative error of known course at N checkpoints, documents that every
checkpoint shares, each with its own difficulty and its own liking for damage, and scatter of its
own for every checkpoint. `qaudit.core.changepoint` looks for a break at 95 %.

- *found*: one break beats a straight line and smooth curves. Above the rule it is a false alarm,
  promised at most 5 %; below, it is power.
- *holds*: the interval holds the true place, in all trials, whether a break was found or not.
- *wide*: the interval's width as a part of the course, in all trials.
- *bent*: no straight line, by its probability alone. Smooth curves are to be bent.

The courses of the middle part are smooth as well, and none of the smooth curves that a break has to
beat: exponentials that rise late, and logistic steps. What is found there is a false alarm that the
test does not promise to avoid.

The last table is of whole audits: eight schemes on the same documents, each looked at for
a break. *alarm*: an audit in which any of them is claimed, each at an eighth of 5 %, as
`qaudit.diagnostics.phases` does.

`handed on` is scatter that one checkpoint hands to the next (autocorrelation 0.6): beyond what is
promised, and shown so that nobody has to find it out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qaudit.core.changepoint import FittedCourse, find_break, trajectory
from qaudit.core.statistics import excess

Array = npt.NDArray[np.float64]
CHANCE = 0.05
PLACE = 0.6


@dataclass(frozen=True)
class Case:
    """A course over positions from 0 to 1, and where it breaks."""

    name: str
    course: Callable[[Array], Array]
    place: float | None = None
    handed_on: float = 0.0


SMOOTH = (
    Case("straight", lambda x: 0.02 + 0.03 * x),
    Case("square root", lambda x: 0.05 * np.sqrt(x)),
    Case("saturating", lambda x: 0.05 * (1 - np.exp(-3 * x))),
    Case("power 2.5", lambda x: 0.02 + 0.05 * x**2.5),
    Case("straight, handed on", lambda x: 0.02 + 0.03 * x, handed_on=0.6),
)
LATE = (
    Case("late exponential, 5", lambda x: 0.02 + 0.05 * np.exp(5 * (x - 1))),
    Case("late exponential, 10", lambda x: 0.02 + 0.05 * np.exp(10 * (x - 1))),
    Case("logistic, 10", lambda x: 0.02 + 0.05 / (1 + np.exp(-10 * (x - PLACE)))),
    Case("logistic, 30", lambda x: 0.02 + 0.05 / (1 + np.exp(-30 * (x - PLACE)))),
)
BROKEN = (
    Case("slope x 4", lambda x: 0.02 + 0.02 * x + 0.06 * np.maximum(0, x - PLACE), PLACE),
    Case("slope x 16", lambda x: 0.02 + 0.01 * x + 0.15 * np.maximum(0, x - PLACE), PLACE),
    Case("doubles from 0.8 on", lambda x: 0.047 + 0.22 * np.maximum(0, x - 0.8), 0.8),
    Case("jump by half", lambda x: 0.02 + 0.01 * x + 0.013 * (x > PLACE), PLACE),
)
SIZES = ((8, 64), (12, 64), (12, 20), (24, 64))
SCATTER = 0.05
SAMPLES = 499
"""Of documents, for each series: a quarter of an audit's, which asks for smaller chances."""
SCHEMES = 8
CHECKPOINTS, DOCUMENTS = 12, 64


def series(draw: np.random.Generator, case: Case, checkpoints: int, documents: int) -> Array:
    """Return sums (2, N, D), quantized and in full precision; scatter is a part of the course."""
    full_ND = full_precision(draw, checkpoints, documents)
    return np.stack([quantized(draw, case, full_ND), full_ND])


def full_precision(draw: np.random.Generator, checkpoints: int, documents: int) -> Array:
    """Return the losses of documents that every checkpoint shares."""
    tokens = np.clip(np.exp(5.3 + 0.5 * draw.standard_normal(documents)), 24, 256)
    difficulty = 3 * np.exp(0.2 * draw.standard_normal(documents)) * tokens
    losses_ND: Array = difficulty * np.exp(0.02 * draw.standard_normal((checkpoints, documents)))
    return losses_ND


def quantized(draw: np.random.Generator, case: Case, full_ND: Array, size: float = 1.0) -> Array:
    """Return what a scheme makes of losses: its error is `size` times the course of the case."""
    checkpoints, documents = full_ND.shape
    course_N = size * case.course(positions(checkpoints))
    liking_D = np.exp(0.4 * draw.standard_normal(documents) - 0.08)
    mean = float(course_N.mean())
    own_ND = 0.4 * mean * draw.standard_normal((checkpoints, documents))
    scatter_N = SCATTER * mean * _handed_on(draw.standard_normal(checkpoints), case.handed_on)
    damage_ND = course_N[:, None] * liking_D + own_ND + scatter_N[:, None]
    losses_ND: Array = full_ND * (1 + damage_ND)
    return losses_ND


def positions(checkpoints: int) -> Array:
    """Return evenly spaced checkpoints, none of them before training began."""
    return np.linspace(0.05, 1, checkpoints)


def _handed_on(fresh_N: Array, part: float) -> Array:
    handed_N = fresh_N.copy()
    for k in range(1, len(fresh_N)):
        handed_N[k] = part * handed_N[k - 1] + (1 - part**2) ** 0.5 * fresh_N[k]
    return handed_N


def looked_at(
    case: Case, checkpoints: int, documents: int, trials: int, samples: int = SAMPLES
) -> Iterator[FittedCourse]:
    """Yield what is found in fresh series, the same for the same arguments."""
    draw = np.random.default_rng(20240229)
    for trial in range(trials):
        sums = series(draw, case, checkpoints, documents)
        found = trajectory(positions(checkpoints), sums, excess, samples=samples, seed=trial)
        yield find_break(found, seed=trial)


def alarms(case: Case, checkpoints: int, documents: int, audits: int) -> float:
    """Return the share of audits in which a break is claimed of any scheme, in percent."""
    draw, alarmed = np.random.default_rng(20240301), 0
    for audit in range(audits):
        full_ND = full_precision(draw, checkpoints, documents)
        sizes = np.geomspace(0.3, 3, SCHEMES)  # eight bits lose less than three
        sums = [np.stack([quantized(draw, case, full_ND, size), full_ND]) for size in sizes]
        alarmed += any(_claims(one, audit) for one in sums)
    return 100 * alarmed / audits


def _claims(sums: Array, seed: int) -> bool:
    found = trajectory(positions(sums.shape[1]), sums, excess, seed=seed)
    return find_break(found, seed=seed).against_curve <= CHANCE / SCHEMES


def shares(case: Case, found: list[FittedCourse]) -> dict[str, float | None]:
    """Return the shares that the table shows, in percent."""
    where = case.place
    held = [] if where is None else [c.best.at.low <= where <= c.best.at.high for c in found]
    return {
        "found": 100 * float(np.mean([c.against_curve <= CHANCE for c in found])),
        "bent": 100 * float(np.mean([c.against_line <= CHANCE for c in found])),
        "holds": 100 * float(np.mean(held)) if held else None,
        "wide": 100 * float(np.mean([c.best.at.high - c.best.at.low for c in found])) / 0.95
        if held
        else None,
    }


def main(trials: int) -> None:
    """Print the table."""
    names = ("found", "bent", "holds", "wide")
    print(f"change points in {trials} series each, in % (one standard error: at most "
          f"{50 / trials**0.5:.1f})")  # fmt: skip
    print(f"{'course':22}{'N':>4}{'D':>4}" + "".join(f"{name:>10}" for name in names))
    for cases in (SMOOTH, LATE, BROKEN):
        for case in cases:
            for checkpoints, documents in SIZES:
                row = shares(case, list(looked_at(case, checkpoints, documents, trials)))
                cells = ("-" if row[n] is None else f"{row[n]:.1f}" for n in names)
                numbers = "".join(f"{cell:>10}" for cell in cells)
                print(f"{case.name:22}{checkpoints:4}{documents:4}{numbers}", flush=True)
        print("-" * 80)
    audits = max(1, trials // 4)
    print(f"audits of {SCHEMES} schemes: {audits} each, in % "
          f"(one standard error: at most {50 / audits**0.5:.1f})")  # fmt: skip
    print(f"{'course':22}{'N':>4}{'D':>4}{'alarm':>10}")
    for case in (*SMOOTH, *LATE):
        share = alarms(case, CHECKPOINTS, DOCUMENTS, audits)
        print(f"{case.name:22}{CHECKPOINTS:4}{DOCUMENTS:4}{share:10.1f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
