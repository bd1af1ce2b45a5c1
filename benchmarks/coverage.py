"""How often the intervals of `qaudit.core.statistics` hold the truth, by simulation.

    python benchmarks/coverage.py [SIMULATIONS]

Each simulation draws fresh documents from a generator whose true values are known from eight
million documents, computes the interval at 95 %, and looks whether the truth lies in it. The
Monte-Carlo error of each share is printed beside it (one standard error, in points).

Generators of (full-precision nll, quantized nll, tokens), per document:

- `lognormal`: log-normal lengths, difficulty, and relative damage that grows with difficulty,
  with token noise that shrinks with length.
- `skewed`: the same, damage and lengths spread so widely that few documents carry the sum.
- `heavy`: relative damage with Student-t(3) noise (no fourth moment), long-tailed lengths.
- `packed`: equal windows, normal damage: nothing to correct, the interval must not be wide.
- `pareto`: damage without third moment, lengths without second. Beyond what is promised;
  shown so that nobody has to find it out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from qaudit.core import statistics

Array = npt.NDArray[np.float64]
Sample = tuple[Array, Array, Array]
DOCUMENTS = (10, 20, 50, 100, 200)
PROMISED = ("lognormal", "skewed", "heavy", "packed")


def _lengths(draw: np.random.Generator, n: int, spread: float, limit: int) -> Array:
    return np.clip(np.exp(5.5 + spread * draw.standard_normal(n)), 20, limit)


def _sample(tokens: Array, loss: Array, damage: Array) -> Sample:
    return loss * tokens, loss * (1 + damage) * tokens, tokens


def lognormal(draw: np.random.Generator, n: int) -> Sample:
    difficulty = draw.standard_normal(n)
    tokens = _lengths(draw, n, 0.8, 1024)
    damage = 0.02 * np.exp(0.4 * draw.standard_normal(n) + 0.2 * difficulty)
    noise = 0.1 / np.sqrt(tokens) * draw.standard_normal(n)
    return _sample(tokens, 3 * np.exp(0.25 * difficulty), damage + noise)


def skewed(draw: np.random.Generator, n: int) -> Sample:
    difficulty = draw.standard_normal(n)
    tokens = _lengths(draw, n, 0.8, 2048)
    damage = 0.02 * np.exp(0.6 * draw.standard_normal(n) + 0.3 * difficulty)
    noise = 0.15 / np.sqrt(tokens) * draw.standard_normal(n)
    return _sample(tokens, 3 * np.exp(0.25 * difficulty), damage + noise)


def heavy(draw: np.random.Generator, n: int) -> Sample:
    difficulty = draw.standard_normal(n)
    damage = 0.02 * np.exp(0.3 * difficulty) + 0.01 * draw.standard_t(3, n)
    return _sample(_lengths(draw, n, 1.0, 2048), 3 * np.exp(0.25 * difficulty), damage)


def packed(draw: np.random.Generator, n: int) -> Sample:
    loss = 3 * np.exp(0.25 * draw.standard_normal(n))
    return _sample(np.full(n, 512.0), loss, 0.02 + 0.01 * draw.standard_normal(n))


def pareto(draw: np.random.Generator, n: int) -> Sample:
    tokens = np.clip(100 * draw.pareto(1.5, n) + 30, 20, 8192)
    loss = 3 * np.exp(0.4 * draw.standard_normal(n))
    return _sample(tokens, loss, 0.004 + 0.024 * draw.pareto(2.5, n))


GENERATORS: dict[str, Callable[[np.random.Generator, int], Sample]] = {
    f.__name__: f for f in (lognormal, skewed, heavy, packed, pareto)
}


@cache
def truth(generator: str) -> dict[str, float]:
    """Return the true values, from eight million documents drawn in eight parts."""
    parts = [
        [column.sum() for column in GENERATORS[generator](np.random.default_rng(900 + k), 10**6)]
        for k in range(8)
    ]
    full, quantized, tokens = np.sum(parts, axis=0)
    return {"ce": quantized / tokens, "relative error": quantized / full - 1}


def coverage(generator: str, documents: int, simulations: int, seed: int) -> dict[str, float]:
    """Return the share of simulations whose 95 % interval held the truth, by quantity."""
    true, draw = truth(generator), np.random.default_rng(seed)
    held = dict.fromkeys(true, 0)
    for _ in range(simulations):
        full, quantized, tokens = GENERATORS[generator](draw, documents)
        found = {
            "ce": statistics.cross_entropy(quantized, tokens),
            "relative error": statistics.relative_error(quantized, full),
        }
        for name, interval in found.items():
            held[name] += interval.low <= true[name] <= interval.high
    return {name: count / simulations for name, count in held.items()}


def main() -> None:
    simulations = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    print(f"coverage of nominal 95 % intervals in {simulations} simulations each, in %")
    print(f"{'generator':<12}{'quantity':<16}" + "".join(f"{n:>15}" for n in DOCUMENTS))
    for generator in GENERATORS:
        columns = [coverage(generator, n, simulations, seed=n) for n in DOCUMENTS]
        for name in columns[0]:
            shares = [column[name] for column in columns]
            errors = [(p * (1 - p) / simulations) ** 0.5 for p in shares]
            cells = [f"{100 * p:.1f} +- {100 * e:.2f}" for p, e in zip(shares, errors, strict=True)]
            mark = "" if generator in PROMISED else "  (beyond what is promised)"
            print(f"{generator:<12}{name:<16}" + "".join(f"{c:>15}" for c in cells) + mark)


if __name__ == "__main__":
    main()
