"""What error to expect of a model before it is measured, by the runs of the laboratory.

`expected.json` beside this file is fitted by `python -m tests.house.expected` to every run that
[docs/science](docs/science.md) publishes: for each scheme one line in two signals, the logarithm
of tokens by parameter and how far the learning rate has come down from its highest. The error is
fitted as asinh(error / 0.001), a logarithm that small errors of either sign have too.

Runs differ by more than their checkpoints do, so a run is left out as a whole, with its forks: the
width is that of the errors at runs left out. Nothing is expected of what no run was like.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import scipy  # its parts load where they are first used

from qaudit.core.statistics import Array
from qaudit.types import Interval

FILE = Path(__file__).with_name("expected.json")
UNIT = 1e-3  # of the error, below which the fit is a line rather than a logarithm
SIZES = 2.0  # models within this factor of the laboratory's are like them
CONFIDENCE = 0.9


@dataclass(frozen=True)
class ExpectedError:
    """One scheme's line, and what it was worth at runs that it was not fitted to."""

    scheme: str
    coefficients: tuple[float, float, float]  # of 1, log(tokens / parameters), decayed part
    spread: float  # of residuals at runs left out
    coverage: float  # of intervals at runs left out
    runs: int
    points: int

    def at(self, tokens_by_parameter: float, decayed: float) -> Interval:
        """Expect an error; `decayed` is 0 at the highest learning rate and 1 at none."""
        x_F = signals(tokens_by_parameter, decayed)
        middle = float(np.dot(self.coefficients, x_F))
        half = self.spread * reach(self.runs)
        low, estimate, high = (UNIT * math.sinh(middle + k * half) for k in (-1, 0, 1))
        return Interval(estimate, low, high)


@dataclass(frozen=True)
class Expectations:
    """The lines of all schemes, and the range of the runs they were fitted to."""

    parameters: int
    tokens_by_parameter: tuple[float, float]
    errors: tuple[ExpectedError, ...]

    def covers(self, parameters: int, tokens: int) -> bool:
        is_like = 1 / SIZES <= parameters / self.parameters <= SIZES
        low, high = self.tokens_by_parameter
        return is_like and low <= tokens / parameters <= high


def reach(runs: int) -> float:
    return float(scipy.special.stdtrit(max(1, runs - 3), 0.5 + CONFIDENCE / 2))


def signals(tokens_by_parameter: float, decayed: float) -> tuple[float, float, float]:
    return (1.0, math.log(tokens_by_parameter), decayed)


def fit(scheme: str, runs_N: Array, signals_NF: Array, errors_N: Array) -> ExpectedError:
    """Fit one scheme's line by least squares, leaving each run out in turn to see its worth."""
    y_N = np.arcsinh(errors_N / UNIT)
    names = np.unique(runs_N)
    residuals_N = np.empty(len(y_N))
    for name in names:
        left_out_N = runs_N == name
        line_F = _least_squares(signals_NF[~left_out_N], y_N[~left_out_N])
        residuals_N[left_out_N] = y_N[left_out_N] - signals_NF[left_out_N] @ line_F
    covered = 0
    for name in names:  # the width, too, without the run that it is held against
        left_out_N = runs_N == name
        half = reach(len(names) - 1) * math.sqrt(float((residuals_N[~left_out_N] ** 2).mean()))
        covered += int((np.abs(residuals_N[left_out_N]) <= half).sum())
    intercept, by_tokens, by_decay = (float(c) for c in _least_squares(signals_NF, y_N))
    return ExpectedError(
        scheme,
        (intercept, by_tokens, by_decay),
        spread=math.sqrt(float((residuals_N**2).mean())),
        coverage=covered / len(y_N),
        runs=len(names),
        points=len(y_N),
    )


def _least_squares(signals_NF: Array, y_N: Array) -> Array:
    line_F: Array = np.linalg.lstsq(signals_NF, y_N, rcond=None)[0].astype(np.float64)
    return line_F


@cache
def expectations() -> Expectations:
    contents = json.loads(FILE.read_text(encoding="utf-8"))
    errors = tuple(
        ExpectedError(**{**row, "coefficients": tuple(row["coefficients"])})
        for row in contents["errors"]
    )
    return Expectations(contents["parameters"], tuple(contents["tokens_by_parameter"]), errors)
