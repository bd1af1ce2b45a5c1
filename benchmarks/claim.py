"""How often the claim about a file holds, and how often another calibration changes the verdict.

    python -m benchmarks.claim [TRIALS]

A verdict is about the weights that are written: draw 0 of one calibration, judged over documents.

- coverage at 95 % of the added loss of one file, by documents: generated (`benchmarks.coverage`),
  and of each of the twelve files that were measured of the demo's soup (`evidence.npz`), whose
  documents are drawn with replacement; the true value is that of all of its documents. Beside it
  that of a studentized bootstrap, of 499 samples each, on skewed damage.
- SHIP where the true added loss is exactly the margin, at the level of a policy with two rules; of
  one candidate, and of the best of several schemes that are equally good, chosen by halves
  (`qaudit.judge.candidates.cross_fitted`): where all documents judge, for all schemes at once.
- two scans that differ in `--calibration-seed` alone: two of the twelve files on the same
  documents, by the mean of their true added losses over the margin.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import numpy.typing as npt

from benchmarks.coverage import GENERATORS, truth
from benchmarks.deciding import LEVEL, outcome
from benchmarks.evidence import SCHEMES, SOUP, recorded, share
from qaudit.core import statistics
from qaudit.types import Interval

Array = npt.NDArray[np.float64]
DOCUMENTS = (32, 64, 100, 320, 1000)
GENERATED = ("lognormal", "skewed", "heavy")
CANDIDATES = (1, 2, 4, 8)
PARTS = (0.5, 0.7, 0.9, 1.0, 1.1, 1.3)  # of the margin


def added(quantized: Array, full: Array, level: float = 0.95) -> Interval:
    """Return what a file adds to the loss, with its interval over documents."""
    return statistics.relative_error(quantized, full, level)


def coverage_of_files(scheme: str, documents: int, trials: int, seed: int) -> int:
    """Count intervals that hold the true value, each of a file and of documents by chance."""
    draw, file = np.random.default_rng(seed), recorded()
    full, files = file.full[SOUP], file.quantized[SOUP, scheme]
    held = 0
    for k in range(trials):
        quantized = files[k % len(files)]
        true = quantized.sum() / full.sum() - 1
        sample = draw.integers(0, len(full), documents)
        interval = added(quantized[sample], full[sample])
        held += interval.low <= true <= interval.high
    return held


def coverage_of_generated(name: str, documents: int, trials: int, seed: int) -> int:
    """Count intervals that hold the true value of a generator."""
    draw, true = np.random.default_rng(seed), truth(name)["relative error"]
    intervals = (
        added(columns[1], columns[0])
        for columns in (GENERATORS[name](draw, documents) for _ in range(trials))
    )
    return sum(interval.low <= true <= interval.high for interval in intervals)


def coverage_of_bootstrap(name: str, documents: int, trials: int, seed: int) -> int:
    """Count intervals of a studentized bootstrap that hold the true value of a generator."""
    draw, true = np.random.default_rng(seed), truth(name)["relative error"]
    held = 0
    for _ in range(trials):
        full, quantized, *_ = GENERATORS[name](draw, documents)
        estimate, error = _studentized(quantized, full)
        again = draw.integers(0, documents, (499, documents))
        estimates, errors = _studentized(quantized[again], full[again])
        below, above = np.quantile((estimates - estimate) / errors, [0.025, 0.975])
        held += bool(estimate - above * error <= true <= estimate - below * error)
    return held


def _studentized(quantized: Array, full: Array) -> tuple[Array, Array]:
    """Return the added loss of samples of documents, and its linearized standard error."""
    ratio, documents = quantized.sum(-1) / full.sum(-1), full.shape[-1]
    influence = (quantized - ratio[..., None] * full) / full.mean(-1, keepdims=True)
    variance = (influence**2).sum(-1) / (documents * (documents - 1))
    return ratio - 1, np.sqrt(variance)


def false_ships(candidates: int, documents: int, trials: int, seed: int) -> int:
    """Count files that ship with a true added loss of exactly the margin.

    Candidates are files of one checkpoint, so that the lowest loss is the lowest added loss.
    """
    draw, ships = np.random.default_rng(seed), 0
    margin = 0.02
    for _ in range(trials):
        tokens = np.clip(np.exp(5.5 + 0.8 * draw.standard_normal(documents)), 20, 1024)
        full = 3 * np.exp(0.25 * draw.standard_normal(documents)) * tokens
        scatter = np.exp(0.4 * draw.standard_normal((candidates, documents)) - 0.08)
        quantized = full * (1 + margin * scatter)
        first = np.arange(documents) % 2 == 0
        best, other = (int(quantized[:, half].sum(axis=1).argmin()) for half in (first, ~first))
        judging, level = ~first, LEVEL
        if best == other:
            judging, level = first | ~first, statistics.simultaneous(LEVEL, candidates)
        interval = added(quantized[best, judging], full[judging], level)
        ships += outcome(interval, margin) is True
    return ships


def disagreements(scheme: str, part: float, trials: int, seed: int) -> dict[str, int]:
    """Count verdicts of two files on the same 64 documents, by how they differ."""
    draw, file = np.random.default_rng(seed), recorded()
    full, files = file.full[SOUP], file.quantized[SOUP, scheme]
    pairs = list(combinations(range(len(files)), 2))
    margin = (files.sum(axis=1).mean() / full.sum() - 1) / part
    counts = {"ship/hold": 0, "ship/undecided": 0, "hold/undecided": 0}
    words = {True: "ship", False: "hold", None: "undecided"}
    for _ in range(trials):
        pair = pairs[draw.integers(len(pairs))]
        sample = draw.integers(0, len(full), 64)
        both = [outcome(added(files[k, sample], full[sample], LEVEL), margin) for k in pair]
        if both[0] is not both[1]:
            names = {words[one] for one in both}
            counts[next(key for key in counts if {*key.split("/")} == names)] += 1
    return counts


def table(trials: int) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"coverage of a file at 95 %, {trials} intervals each, in %"
    yield f"{'documents':<16}" + "".join(f"{count:>36}" for count in DOCUMENTS)
    for name in GENERATED:
        counts = [coverage_of_generated(name, n, trials, n) for n in DOCUMENTS]
        yield f"{name:<16}" + "".join(f"{share(count, trials):>36}" for count in counts)
    counts = [coverage_of_bootstrap("skewed", n, trials, n) for n in DOCUMENTS[:2]]
    yield f"{'skewed, boot-t':<16}" + "".join(f"{share(count, trials):>36}" for count in counts)
    for scheme in SCHEMES:
        counts = [coverage_of_files(scheme, n, trials, n) for n in DOCUMENTS]
        yield f"{scheme:<16}" + "".join(f"{share(count, trials):>36}" for count in counts)
    yield ""
    yield f"SHIP with a true added loss of the margin, {trials} audits each, in %"
    for candidates in CANDIDATES:
        counts = [false_ships(candidates, n, trials, n) for n in DOCUMENTS]
        label = f"best of {candidates}"
        yield f"{label:<16}" + "".join(f"{share(count, trials):>36}" for count in counts)
    yield ""
    yield f"two scans with another calibration seed, {trials} pairs each: other verdicts, in %"
    for scheme in SCHEMES:
        for part in PARTS:
            found = disagreements(scheme, part, trials, 0)
            cells = [f"{key} {100 * count / trials:5.1f}" for key, count in found.items()]
            whole = share(sum(found.values()), trials)
            yield f"{scheme:<12}{part:>5} of the margin   {'   '.join(cells)}   all {whole}"


def main() -> None:
    for line in table(int(sys.argv[1]) if len(sys.argv) > 1 else 4000):
        print(line, flush=True)


if __name__ == "__main__":
    main()
