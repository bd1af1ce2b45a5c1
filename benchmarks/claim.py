"""How often SHIP is wrong at the margin, how often it is right below it, and whether audits agree.

    python -m benchmarks.claim DEMO DOCSTRINGS [TRIALS]

`DEMO` is the folder of `qaudit scan demo`; `DOCSTRINGS` of the soup and its ingredients on
docstrings of numpy and scipy (benchmarks/README.md has the command). Documents of these audits are
drawn with replacement, whose totals are then the truth; in the tied cases every subject has the
same loss, and every scheme adds the same. The rule is that of `qaudit.judge.choose` and
`qaudit.judge.gate`, for many audits at once: contenders by paired differences, an upper end at
2.5 %/K and, of more than four, at least the lower quartile of those of all contenders; of the
leader's subject the first scheme (fewest bits) ships whose end is within the margin.

- false SHIP: the margin is exactly what the best candidate adds, and what ships adds no less.
  `bits`: any of all candidates within it, K all of them, as `--objective bits@2%` chooses.
- SHIP at 0.5 and 0.7 margins; the same verdict on two sets of documents at 0.7.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import special

from qaudit.core.statistics import KURTOSIS_WEIGHT, SKEWNESS_WEIGHT
from qaudit.saved.evidence import read_saved
from qaudit.types import FULL_PRECISION

Array = npt.NDArray[np.float64]
DOCUMENTS = (32, 64, 128, 256)
FOUR, THREE = ("gptq-4bit", "awq-4bit", "bnb-nf4"), ("gptq-3bit",)
ALPHA = 0.025
FEW = 4  # contenders, up to which each is bounded by its own documents alone
ADDED = 0.014  # of the tied cases


def sums_of(folder: Path, subjects: int, schemes: Sequence[str]) -> tuple[Array, Array]:
    """Return losses in full precision (S, D), and what each scheme adds (S, C, D)."""
    saved = read_saved(folder)
    labels = [s.label for s in saved.audit.subjects]
    labels = [*labels[-1:], *labels[-2::-1]][:subjects]  # the soup, then the last first
    nll = {(m.subject, m.scheme): m.evidence.nll_sum for m in saved.measurements}
    full = np.stack([nll[label, FULL_PRECISION] for label in labels]).astype(float)
    added = np.stack([[nll[label, scheme] for scheme in schemes] for label in labels])
    return full, added - full[:, None]


def tied(full_SD: Array, added_SCD: Array) -> tuple[Array, Array]:
    """Let the total of every subject be the same, and what every scheme adds to it."""
    full_SD = full_SD * (full_SD[0].sum() / full_SD.sum(1))[:, None]
    rest = ADDED * full_SD.sum(1)[:, None] - added_SCD.sum(2)
    return full_SD, added_SCD + rest[:, :, None] * (full_SD / full_SD.sum(1)[:, None])[:, None]


def further(full_SD: Array, added_SCD: Array, subjects: int) -> tuple[Array, Array]:
    """Return as many subjects that are like the first: 40 % of what moves a document is common."""
    draw, count = np.random.default_rng(5), full_SD.shape[1]
    rate_CD = added_SCD[0] / full_SD[0]
    mean_C1 = rate_CD.mean(1, keepdims=True)
    common = draw.integers(0, count, 2000)
    full = full_SD[0, common] * np.exp(0.002 * draw.standard_normal((subjects, 2000)))
    alone = (rate_CD - mean_C1)[:, draw.integers(0, count, (subjects, 2000))].transpose(1, 0, 2)
    shared = (rate_CD - mean_C1)[:, common]
    rate = mean_C1 + np.sqrt(0.4) * shared + np.sqrt(0.6) * alone
    return full, rate * full[:, None]


def reaches(quantized: Array, full: Array, level: Array | float) -> tuple[Array, Array, Array]:
    """Return added losses, and how far their intervals reach below and above, by the last axis."""
    n = full.shape[-1]
    total_q, total_f = quantized.sum(-1, keepdims=True), full.sum(-1, keepdims=True)
    without = (total_q - quantized) / (total_f - full)
    influence = (n - 1) * (without.mean(-1, keepdims=True) - without)
    second = (influence**2).mean(-1)
    scaled = influence / np.sqrt(np.where(second > 0, second, 1))[..., None]
    skewness = (scaled**3).mean(-1) * np.sqrt(n * (n - 1)) / (n - 2)
    excess = (n - 1) / ((n - 2) * (n - 3)) * ((n + 1) * ((scaled**4).mean(-1) - 3) + 6)
    freedom = np.maximum(2.0, (n - 1) / (1 + KURTOSIS_WEIGHT * np.maximum(0, excess) * (n - 1) / n))
    error = np.sqrt(second / (n - 1))

    def side(alpha: Array | float, sign: int) -> Array:
        normal = special.ndtri(1 - alpha)
        shift = SKEWNESS_WEIGHT * skewness * (1 + 2 * normal**2) / np.sqrt(n)
        half = special.stdtrit(freedom, 1 - alpha) * (1 + 1 / n)
        found: Array = error * (half + np.maximum(sign * shift, 0))
        return found

    return (total_q / total_f)[..., 0] - 1, side(ALPHA, -1), side(level, 1)


def judged(
    full_SD: Array, added_SCD: Array, documents: int, trials: int, seed: int
) -> tuple[Array, Array, Array]:
    """Return, of each audit, what may ship (K, A) as its upper ends, the leader's lower end, and
    the upper ends of all candidates where all count.

    An upper end is infinite where a candidate may not ship.
    """
    subjects, schemes, population = added_SCD.shape
    count = subjects * schemes
    subject_K = np.repeat(np.arange(subjects), schemes)
    quantized_KD = (added_SCD + full_SD[:, None]).reshape(count, population)
    draw, batch = np.random.default_rng(seed), max(2, int(1.5e7 / (count * documents * 8)))
    rows = []
    for begin in range(0, trials, batch):
        sample = draw.integers(0, population, (min(batch, trials - begin), documents))
        full, quantized = full_SD[:, sample], quantized_KD[:, sample]
        audits = np.arange(len(sample))
        leader = quantized.sum(2).argmin(0)
        tokens = full[0]
        apart = quantized - quantized[leader, audits]
        mean = apart.sum(2) / tokens.sum(1)
        residual = apart - mean[:, :, None] * tokens
        error = np.sqrt((residual**2).sum(2) * documents / (documents - 1)) / tokens.sum(1)
        cut = special.stdtrit(documents - 1.0, 1 - ALPHA / max(1, count - 1))
        contends = mean <= cut * error
        at_once = contends.sum(0)
        may_ship = contends & (subject_K[:, None] == subject_K[leader])
        estimate, below, above = reaches(quantized, full[subject_K], ALPHA / at_once)
        least = np.sort(np.where(contends, above, np.inf), axis=0)[(at_once - 1) // 4, audits]
        high = estimate + np.maximum(above, np.where(at_once > FEW, least, 0))
        every = estimate + reaches(quantized, full[subject_K], ALPHA / count)[2]
        low = (estimate - below)[leader, audits]
        rows.append((np.where(may_ship, high, np.inf), low, every))
    high, low, every = (np.concatenate(each, axis=-1) for each in zip(*rows, strict=True))
    return high, low, every


def line(name: str, full_SD: Array, added_SCD: Array, documents: int, trials: int) -> str:
    truth = (added_SCD.sum(2) / full_SD.sum(1)[:, None]).ravel()
    best = truth[(full_SD[:, None] + added_SCD).sum(2).argmin()]
    high, low, every = judged(full_SD, added_SCD, documents, trials, documents)
    ships = {part: high <= best / part * (1 + 1e-12) for part in (0.5, 0.7, 1.0)}
    first = np.argmax(ships[1.0], axis=0)  # schemes are in the order of their bits
    wrong = ships[1.0].any(0) & (truth[first] >= best * (1 - 1e-9))
    verdict = ships[0.7].any(0).astype(int) - (low > best / 0.7)
    agree = (verdict[::2][: len(verdict) // 2] == verdict[1::2][: len(verdict) // 2]).mean()
    least = (every.min(0) <= truth.min() * (1 + 1e-12)).mean()
    numbers = [wrong.mean(), least, *(ships[part].any(0).mean() for part in (0.5, 0.7)), agree]
    texts = "".join(f"{100 * number:9.1f}" for number in numbers)
    return f"{name:<22}{documents:>5}{texts}"


def cases(demo: Path, docstrings: Path) -> Iterator[tuple[str, Array, Array]]:
    yield "demo, 4 bits", *sums_of(demo, 15, FOUR)
    yield "demo, 3 bits", *sums_of(demo, 15, ("gptq-3bit", "awq-3bit", "rtn-3bit"))
    yield "docstrings, 4 bits", *sums_of(docstrings, 4, FOUR)
    yield "docstrings, 3 bits", *sums_of(docstrings, 4, THREE)
    base = sums_of(demo, 15, FOUR)
    four = base[0][:4], base[1][:4]
    yield "4 x 3 tied", *tied(*four)
    yield "15 x 3 tied", *tied(*base)
    yield "64 x 3 tied", *tied(*further(*base, 64))
    draw = np.random.default_rng(6)
    place = np.arange(2048) % base[0].shape[1]
    full, added = four[0][:, place], four[1][:, :, place]
    apart, common = draw.standard_normal(added.shape), draw.standard_normal(len(place))
    yield "4 x 3 lognormal", *tied(full, added * np.exp(np.sqrt(0.5) * (apart + common) - 0.5))
    yield "rare 5 % x 19", *tied(full, added * np.where(draw.random(added.shape) < 0.05, 19.0, 1.0))


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: python -m benchmarks.claim DEMO DOCSTRINGS [TRIALS]")
    trials = int(sys.argv[3]) if len(sys.argv) > 3 else 4000
    print(f"{trials} audits each (fewer of 64 x 3), in %")
    print(f"{'':<22}{'N':>5}{'false':>9}{'bits':>9}{'at 0.5':>9}{'at 0.7':>9}{'agree':>9}")
    for name, full, added in cases(Path(sys.argv[1]), Path(sys.argv[2])):
        for documents in DOCUMENTS:
            many = trials // 4 if added.shape[0] > 15 else trials
            print(line(name, full, added, documents, many), flush=True)


if __name__ == "__main__":
    main()
