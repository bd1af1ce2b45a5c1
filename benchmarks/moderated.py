"""How often intervals over a few draws hold, with each cell's own variance and moderated.

    python -m benchmarks.moderated [REPETITIONS]

Each cell's true variance is drawn anew: logarithms of standard deviations scatter by so much around
what the damage explains. The interval is for the mean over the cell's draws.
"""

from __future__ import annotations

import sys

import numpy as np
from scipy import special

from qaudit.core.draws import DrawNoise, moderated


def covered(
    scatter: float, others: int, draws: int, level: float, repetitions: int
) -> tuple[float, float, float, float]:
    """Return coverage and mean reach in true standard errors: moderated, then by its own draws."""
    generator, freedom = np.random.default_rng(0), draws - 1
    hits, reach = np.zeros(2), np.zeros(2)
    for _ in range(repetitions):
        log_K = generator.normal(0, 2 * scatter, 1 + others)
        variance_K = np.exp(log_K) * generator.chisquare(freedom, 1 + others) / freedom
        own, *rest = (DrawNoise(float(v), 0.0, freedom) for v in variance_K)
        error = abs(generator.normal(0, np.exp(log_K[0] / 2)))
        for k, noise in enumerate((moderated(own, rest), own)):
            far = special.stdtrit(noise.freedom, 0.5 + level / 2) * np.sqrt(noise.variance)
            hits[k] += error <= far
            reach[k] += far / np.exp(log_K[0] / 2)
    hits, reach = hits / repetitions, reach / repetitions
    return float(hits[0]), float(reach[0]), float(hits[1]), float(reach[1])


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print("scatter others draws  level  moderated   own draws")
    for scatter in (0.0, 0.3, 0.5):
        for others in (1, 3, 5):
            for draws in (3, 5, 7):
                for level in (0.95, 0.9917):
                    hit, far, own, own_far = covered(scatter, others, draws, level, repetitions)
                    print(
                        f"{scatter:7} {others:6} {draws:5} {level:6} "
                        f"{hit:.3f} {far:5.2f} {own:.3f} {own_far:5.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
