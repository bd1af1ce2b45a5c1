"""How often a comparison errs, and how often it finds what is there.

    python -m benchmarks.trials [TRIALS]

Two quantizations are compared by the difference of their relative errors, each calibrated R
times and measured on the same documents (`qaudit.core.draws`). Every share has its Monte-Carlo
error (one standard error) and its upper bound at 95 % beside it.

- A/A, simulated: one model, calibrated on two independent sets of draws. What a draw does to
  all documents alike, and what it does to each, are both there; a difference is not.
- A/A, measured: the same from `evidence.npz`: disjoint sets of the measured calibration draws of
  the demo's last checkpoint, documents drawn anew with replacement. There are few draws, so that
  trials share them: the share is one for these draws, whatever the number of trials.
- the same with one draw each and documents alone for noise. It errs wherever draws differ by more
  than documents explain; that is why calibration is repeated.
- power: one of two is worse by 1 % of the loss. Each trial begins with a pilot of its own, that
  names how many documents will find this in 80 % of all cases (`qaudit.core.draws`); that many
  are then measured afresh, with fresh draws. Among measured evidence the worse one is moved along
  the way from 4 to 3 bits as far as makes 1 %, so that it is worse where 3 bits are worse.

What is simulated is as noisy as the demo's last checkpoint under gptq-3bit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy import stats

from benchmarks.evidence import CHECKPOINT, SCHEMES, recorded
from qaudit.core.draws import pooled
from qaudit.core.power import documents_to_detect

Array = npt.NDArray[np.float64]
Columns = tuple[Array, ...]
"""Quantized, full precision, twice; (draws, documents) where drawn."""

Seeds = npt.NDArray[np.int64]
Twins = Callable[[np.random.Generator, int], Columns]
"""Documents to the sums of every draw."""
Trial = Callable[[np.random.Generator], tuple[Columns, Callable[[int], Columns]]]
"""A pilot, and what is measured afresh once it has named a number of documents."""

MEASURED = SCHEMES[:2]  # 4 bits, and 3
DAMAGE, WORSE = 0.07, 0.01
FOR_ALL, FOR_EACH = 0.0025, 0.0175
"""What a simulated draw moves the relative error by: of all documents alike, of each its own."""

PILOT = 100
MOST = 20_000  # documents: a pilot that asks for more is counted, and not followed


def difference(sums: Array) -> Array:
    """Return the relative error of a minus that of b, from sums (qa, fa, qb, fb)."""
    return sums[0] / sums[1] - sums[2] / sums[3]


def simulated(
    draw: np.random.Generator, documents: int, draws: int, worse: float, for_all: float
) -> Columns:
    """Return two quantizations of one model, each calibrated on texts of its own."""
    tokens = np.clip(np.exp(5.5 + 0.8 * draw.standard_normal(documents)), 20, 1024)
    full = 3 * np.exp(0.25 * draw.standard_normal(documents)) * tokens
    own = DAMAGE * np.exp(0.4 * draw.standard_normal(documents) - 0.08)

    def quantized(extra: float) -> Array:
        alike = for_all * draw.standard_normal((draws, 1))
        each = FOR_EACH * draw.standard_normal((draws, documents))
        noise = 0.01 / np.sqrt(tokens) * draw.standard_normal((draws, documents))
        return full * (1 + own + alike + each + noise + extra)

    return quantized(worse), full, quantized(0.0), full


@dataclass(frozen=True, eq=False)
class Measured:
    """What was measured of one checkpoint under one scheme, and what 1 % worse would be."""

    full_D: Array
    good_SD: Array
    worse_SD: Array

    @classmethod
    def of(cls, scheme: str) -> Measured:
        file = recorded()
        full_D = file.full[CHECKPOINT]
        four_SD, three_SD = (file.quantized[CHECKPOINT, scheme] for scheme in MEASURED)
        apart_D = (three_SD - four_SD).mean(axis=0)
        worse_D = apart_D * WORSE * full_D.sum() / apart_D.sum()
        good_SD = file.quantized[CHECKPOINT, scheme]
        return cls(full_D, good_SD, good_SD + worse_D)

    def pairs(
        self, draw: np.random.Generator, documents: int, seeds: Seeds, worse: bool
    ) -> Columns:
        """Return two disjoint sets of measured draws, over documents drawn with replacement."""
        sample = draw.integers(0, len(self.full_D), documents)
        full, good = self.full_D[sample], self.good_SD[:, sample]
        first = self.worse_SD[:, sample] if worse else good
        half = len(seeds) // 2
        return first[seeds[:half]], full, good[seeds[half:]], full


# --------------------------------------------------------------------- A/A


def share(hits: int, trials: int) -> str:
    """Print a share with its Monte-Carlo error and its upper bound at 95 %."""
    p = hits / trials
    error = math.sqrt(p * (1 - p) / trials)
    upper = float(stats.beta.ppf(0.95, hits + 1, trials - hits)) if hits < trials else 1.0
    return f"{100 * p:5.1f} % +- {100 * error:.1f}, at most {100 * upper:.1f} %"


def said_to_differ(twins: Twins, documents: int, trials: int, seed: int) -> int:
    """Count the trials that find a difference where there is none."""
    draw, wrong = np.random.default_rng(seed), 0
    for _ in range(trials):
        found = pooled(twins(draw, documents), difference).interval
        wrong += not found.low <= 0 <= found.high
    return wrong


def simulated_twins(draws: int, for_all: float = FOR_ALL) -> Twins:
    return lambda draw, documents: simulated(draw, documents, draws, 0.0, for_all)


def measured_twins(scheme: str, draws: int) -> Twins:
    file = Measured.of(scheme)

    def twins(draw: np.random.Generator, documents: int) -> Columns:
        seeds = draw.permutation(len(file.good_SD))[: 2 * draws]
        return file.pairs(draw, documents, seeds, worse=False)

    return twins


def pairs_as_measured(scheme: str) -> tuple[int, int]:
    """Count the pairs of single draws that are said to differ on the measured documents."""
    file = Measured.of(scheme)
    pairs = list(combinations(range(len(file.good_SD)), 2))
    wrong = 0
    for a, b in pairs:
        sums = file.good_SD[a], file.full_D, file.good_SD[b], file.full_D
        found = pooled(sums, difference).interval
        wrong += not found.low <= 0 <= found.high
    return wrong, len(pairs)


def report_twins(trials: int) -> Iterator[str]:
    yield f"A/A simulated, {trials} trials each: said to differ"
    for documents in (20, 50, 100, 200):
        for draws in (1, 2, 3, 5):
            wrong = said_to_differ(simulated_twins(draws), documents, trials, documents)
            yield f"  {documents:4d} documents, draws {draws} + {draws}: {share(wrong, trials)}"
    wrong = said_to_differ(simulated_twins(1, 0.0), 100, trials, 0)
    yield f"   100 documents, draws 1 + 1, noise of documents alone: {share(wrong, trials)}"
    documents = len(recorded().tokens)
    for scheme in MEASURED:
        yield f"A/A measured, {scheme}, {documents} documents, {trials} trials each: said to differ"
        for draws in (1, 2, 3, 5):
            wrong = said_to_differ(measured_twins(scheme, draws), documents, trials, draws)
            yield f"  draws {draws} + {draws}: {share(wrong, trials)}"
        wrong, pairs = pairs_as_measured(scheme)
        share_of_pairs = f"{100 * wrong / pairs:5.1f} % of all {pairs} pairs"
        yield f"  draws 1 + 1, no document drawn anew: {share_of_pairs}"


# --------------------------------------------------------------------- power


def simulated_trial(draws: int, for_all: float = FOR_ALL) -> Trial:
    def trial(draw: np.random.Generator) -> tuple[Columns, Callable[[int], Columns]]:
        pilot = simulated(draw, PILOT, draws, WORSE, for_all)
        return pilot, lambda named: simulated(draw, named, draws, WORSE, for_all)

    return trial


def measured_trial(scheme: str, draws: int) -> Trial:
    """Return what measures documents and draws that the pilot has not seen."""
    file = Measured.of(scheme)

    def trial(draw: np.random.Generator) -> tuple[Columns, Callable[[int], Columns]]:
        seeds = draw.permutation(len(file.good_SD))
        pilot, rest = seeds[: 2 * draws], seeds[2 * draws : 4 * draws]
        return (
            file.pairs(draw, PILOT, pilot, worse=True),
            lambda named: file.pairs(draw, named, rest, worse=True),
        )

    return trial


def found_as_named(trial: Trial, trials: int, seed: int) -> str:
    """Let pilots name numbers, measure so many documents, and say how often that was enough."""
    draw, numbers, hits = np.random.default_rng(seed), [], 0
    for _ in range(trials):
        pilot, fresh = trial(draw)
        count = documents_to_detect(pilot, difference, WORSE)
        if count is None or count > MOST:
            continue
        numbers.append(count)
        hits += pooled(fresh(count), difference).interval.low > 0
    if not numbers:
        return f"no pilot names {MOST} documents or fewer"
    low, middle, high = np.quantile(numbers, (0.1, 0.5, 0.9))
    named = f"{middle:.0f} documents in the middle, {low:.0f} to {high:.0f} for most"
    return (
        f"{share(hits, len(numbers))}; {100 * len(numbers) / trials:.0f} % of pilots name {named}"
    )


def report_power(trials: int) -> Iterator[str]:
    yield f"power simulated, {trials} pilots of {PILOT} documents each: found with what they named"
    found = found_as_named(simulated_trial(1, 0.0), trials, 0)
    yield f"  draws 1 + 1, noise of documents alone: {found}"
    for draws in (1, 2, 3, 5, 8):
        yield f"  draws {draws} + {draws}: {found_as_named(simulated_trial(draws), trials, draws)}"
    for scheme in MEASURED:
        yield f"power measured, {scheme}, {trials} pilots of {PILOT} documents each"
        for draws in (1, 2, 3, 5, 8):
            if 4 * draws > len(recorded().about["seeds"]):
                continue
            found = found_as_named(measured_trial(scheme, draws), trials, draws)
            yield f"  draws {draws} + {draws}: {found}"


def main() -> None:
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for report in (report_twins, report_power):
        for line in report(trials):
            print(line, flush=True)


if __name__ == "__main__":
    main()
