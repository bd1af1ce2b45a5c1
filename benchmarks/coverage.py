"""How often the intervals of `qaudit.core.statistics` hold the truth, by simulation.

    python -m benchmarks.coverage [SIMULATIONS] [GENERATOR...]

Each simulation draws fresh documents from a generator whose true values are known, computes the
interval at 95 %, and looks whether the truth lies in it. The Monte-Carlo error of each share is
printed beside it (one standard error, in points).

Generators of one subject; the truth is that of eight million documents, or of the whole file:

- `lognormal`: log-normal lengths, difficulty, and relative damage that grows with difficulty,
  with token noise that shrinks with length.
- `skewed`: the same, damage and lengths spread so widely that few documents carry the sum.
- `heavy`: relative damage with Student-t(3) noise (no fourth moment), long-tailed lengths.
- `packed`: equal windows, normal damage: nothing to correct, the interval must not be wide.
- `demo-4bit`, `demo-3bit`: the documents of `evidence.npz`, as measured on the demo's last
  checkpoint, drawn with replacement.
- `pareto`: damage without third moment, lengths without second. Beyond what is promised.
- `rare-1`, `rare-2`, `rare-5`: as `lognormal`, with 1, 2 or 5 % of documents that lose 50, 27 or 10
  times as much: a third of the damage. Every moment is finite; what fails is that
  few documents, or none, are among those measured. Beyond what is promised.

Generators of two subjects on the same documents, for the differences between them:

- `twins`: two of `skewed` that share lengths, difficulty and most of their damage.
- `strangers`: two that share lengths and difficulty only, damage as in `heavy`.
- `demo-soup-4bit`, `demo-soup-3bit`: the demo's soup beside its last checkpoint, as measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from benchmarks.evidence import CHECKPOINT, SOUP, recorded
from qaudit.core import statistics
from qaudit.types import Interval

Array = npt.NDArray[np.float64]
Columns = tuple[Array, ...]
"""(full, quantized, tokens) of one subject, (full, quantized, full, quantized, tokens) of two."""

Generator = Callable[[np.random.Generator, int], Columns]

DOCUMENTS = (10, 20, 50, 100, 200)


def _lengths(draw: np.random.Generator, n: int, spread: float, limit: int) -> Array:
    return np.clip(np.exp(5.5 + spread * draw.standard_normal(n)), 20, limit)


def _sums(tokens: Array, loss: Array, damage: Array) -> Columns:
    return loss * tokens, loss * (1 + damage) * tokens, tokens


# --------------------------------------------------------------------- one subject


def lognormal(draw: np.random.Generator, n: int) -> Columns:
    difficulty = draw.standard_normal(n)
    tokens = _lengths(draw, n, 0.8, 1024)
    damage = 0.02 * np.exp(0.4 * draw.standard_normal(n) + 0.2 * difficulty)
    noise = 0.1 / np.sqrt(tokens) * draw.standard_normal(n)
    return _sums(tokens, 3 * np.exp(0.25 * difficulty), damage + noise)


def skewed(draw: np.random.Generator, n: int) -> Columns:
    difficulty = draw.standard_normal(n)
    tokens = _lengths(draw, n, 0.8, 2048)
    damage = 0.02 * np.exp(0.6 * draw.standard_normal(n) + 0.3 * difficulty)
    noise = 0.15 / np.sqrt(tokens) * draw.standard_normal(n)
    return _sums(tokens, 3 * np.exp(0.25 * difficulty), damage + noise)


def heavy(draw: np.random.Generator, n: int) -> Columns:
    difficulty = draw.standard_normal(n)
    damage = 0.02 * np.exp(0.3 * difficulty) + 0.01 * draw.standard_t(3, n)
    return _sums(_lengths(draw, n, 1.0, 2048), 3 * np.exp(0.25 * difficulty), damage)


def packed(draw: np.random.Generator, n: int) -> Columns:
    loss = 3 * np.exp(0.25 * draw.standard_normal(n))
    return _sums(np.full(n, 512.0), loss, 0.02 + 0.01 * draw.standard_normal(n))


def pareto(draw: np.random.Generator, n: int) -> Columns:
    tokens = np.clip(100 * draw.pareto(1.5, n) + 30, 20, 8192)
    loss = 3 * np.exp(0.4 * draw.standard_normal(n))
    return _sums(tokens, loss, 0.004 + 0.024 * draw.pareto(2.5, n))


def rare(share: float, times: float) -> Generator:
    """Return a generator of damage of which few documents carry much."""

    def drawn(draw: np.random.Generator, n: int) -> Columns:
        full, quantized, tokens = lognormal(draw, n)
        struck = draw.random(n) < share
        return full, full + (quantized - full) * np.where(struck, times, 1.0), tokens

    return drawn


# --------------------------------------------------------------------- two subjects


def twins(draw: np.random.Generator, n: int) -> Columns:
    full, quantized, tokens = skewed(draw, n)
    other = full * np.exp(0.03 * draw.standard_normal(n) - 0.02)
    damage = (quantized / full - 1) * 0.9 * np.exp(0.3 * draw.standard_normal(n))
    return full, quantized, other, other * (1 + damage), tokens


def strangers(draw: np.random.Generator, n: int) -> Columns:
    full, quantized, tokens = heavy(draw, n)
    other = full * np.exp(0.1 * draw.standard_normal(n) - 0.02)
    damage = 0.015 + 0.01 * draw.standard_t(3, n)
    return full, quantized, other, other * (1 + damage), tokens


# --------------------------------------------------------------------- measured


def measured(name: str) -> Columns:
    """Return all documents of `evidence.npz` under one scheme, calibrated with the first seed."""
    scheme = f"gptq-{name.rpartition('-')[2]}"
    subjects = (CHECKPOINT, SOUP) if "soup" in name else (CHECKPOINT,)
    file = recorded()
    pairs = ((file.full[s], file.quantized[s, scheme][0]) for s in subjects)
    return (*(column for pair in pairs for column in pair), file.tokens)


def resampling(name: str) -> Generator:
    """Return a generator that draws measured documents with replacement."""

    def drawn(draw: np.random.Generator, n: int) -> Columns:
        columns = measured(name)
        sample = draw.integers(0, len(columns[-1]), n)
        return tuple(column[sample] for column in columns)

    return drawn


MEASURED = ("demo-4bit", "demo-3bit")
MEASURED_PAIRS = ("demo-soup-4bit", "demo-soup-3bit")
Generators = Mapping[str, Generator]
GENERATORS: Generators = {
    **{f.__name__: f for f in (lognormal, skewed, heavy, packed)},
    **{name: resampling(name) for name in MEASURED},
    "pareto": pareto,
    "rare-1": rare(0.01, 50),
    "rare-2": rare(0.02, 27),
    "rare-5": rare(0.05, 10),
}
PAIRS: Generators = {
    "twins": twins,
    "strangers": strangers,
    **{name: resampling(name) for name in MEASURED_PAIRS},
}
BEYOND = ("pareto", "rare-1", "rare-2", "rare-5")
PROMISED = tuple(name for name in (*GENERATORS, *PAIRS) if name not in BEYOND)


# --------------------------------------------------------------------- coverage


def intervals(columns: Columns) -> dict[str, Interval]:
    """Return every interval that one subject, or two, have."""
    if len(columns) == 3:
        full, quantized, tokens = columns
        return {
            "ce": statistics.cross_entropy(quantized, tokens),
            "relative error": statistics.relative_error(quantized, full),
        }
    full_a, quantized_a, full_b, quantized_b, tokens = columns
    a, b = (quantized_a, full_a), (quantized_b, full_b)
    return {
        "outright": statistics.absolute_change(quantized_a, quantized_b, tokens),
        "difference of differences": statistics.interval(
            (*a, *b, tokens), statistics.change_difference
        ),
        "relative error difference": statistics.interval((*a, *b), statistics.excess_difference),
    }


@cache
def truth(generator: str) -> dict[str, float]:
    """Return the true values: of the whole file, or of eight million documents in eight parts."""
    if generator in (*MEASURED, *MEASURED_PAIRS):
        totals = [np.array([column.sum()]) for column in measured(generator)]
    else:
        make = {**GENERATORS, **PAIRS}[generator]
        parts = [
            [column.sum() for column in make(np.random.default_rng(900 + k), 10**6)]
            for k in range(8)
        ]
        totals = [np.array([total]) for total in np.sum(parts, axis=0)]
    return {name: found.estimate for name, found in intervals(tuple(totals)).items()}


def coverage(generator: str, documents: int, simulations: int, seed: int) -> dict[str, float]:
    """Return the share of simulations whose 95 % interval held the truth, by quantity."""
    true, draw = truth(generator), np.random.default_rng(seed)
    make = {**GENERATORS, **PAIRS}[generator]
    held = dict.fromkeys(true, 0)
    for _ in range(simulations):
        for name, interval in intervals(make(draw, documents)).items():
            held[name] += interval.low <= true[name] <= interval.high
    return {name: count / simulations for name, count in held.items()}


def table(simulations: int, generators: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the report, each as soon as it is known."""
    yield f"coverage of nominal 95 % intervals in {simulations} simulations each, in %"
    yield f"{'generator':<16}{'quantity':<27}" + "".join(f"{n:>15}" for n in DOCUMENTS)
    for generator in generators:
        columns = [coverage(generator, n, simulations, seed=n) for n in DOCUMENTS]
        for name in columns[0]:
            shares = [column[name] for column in columns]
            errors = [(p * (1 - p) / simulations) ** 0.5 for p in shares]
            cells = [f"{100 * p:.1f} +- {100 * e:.2f}" for p, e in zip(shares, errors, strict=True)]
            mark = "" if generator in PROMISED else "  (beyond what is promised)"
            yield f"{generator:<16}{name:<27}" + "".join(f"{c:>15}" for c in cells) + mark


def main() -> None:
    simulations = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    for line in table(simulations, sys.argv[2:] or (*GENERATORS, *PAIRS)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
