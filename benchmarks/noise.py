"""How far intervals over documents and draws hold, and how often a second scan changes its mind.

    python -m benchmarks.noise [TRIALS]

One model under one scheme is simulated from what was measured of the demo's last checkpoint
(`evidence.npz`: draws of calibration text that share no document). Documents are drawn anew with
replacement; a draw moves all documents alike, by as much as measured, and each by a measured
residual of its own. Three draws are made of a pick and of a rival, as by default, and one of each
other cell, which takes its noise from those (`qaudit.judge.draw_noise`).

- coverage at 95 % of the relative error, of the scheme and not of a draw: with three draws, with
  one and the noise of the others, and with one and documents alone. `wide` is how far the interval
  reaches over how far it has to, 1.96 standard deviations of its estimates.
- the same model, drawn twice, reported as different: one draw each, and three each.
- a gate on the same weights scanned again, on the same documents with other draws and on other
  documents too: pass once and fail once, and inconclusive the first time, by the true error over
  the margin. It is a single rule's, judged at 95 %: where a policy has several rules that are
  errors, the intervals of a gate hold at once and are wider, so that it turns less often and is
  inconclusive more often.
- a real rescan: the measured draws in groups of three, nothing simulated.
- soups: the best of several by half of the documents is compared with the last checkpoint. None is
  better; documents differ between any two by as much as between the demo's soup and checkpoint.

Every share has its Monte-Carlo error (one standard error) and its upper bound at 95 % beside it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from benchmarks.evidence import CHECKPOINT, SCHEMES, SOUP, recorded
from benchmarks.trials import difference, share
from qaudit.core.draws import DrawNoise, combined, draw_noise, pooled
from qaudit.core.statistics import change, excess, interval
from qaudit.types import Interval

Array = npt.NDArray[np.float64]
DRAWS = 3
FACTORS = (0.5, 0.8, 1.0, 1.25)
"""The true error over the margin."""

RESCANS = ("other draws", "other draws and documents")


@dataclass(frozen=True, eq=False)
class Model:
    """What was measured of a checkpoint under a scheme, as parts to simulate from."""

    full_D: Array
    mean_D: Array
    residual_RD: Array  # of each draw and document, without what the draw does to all alike
    alike: float  # standard deviation of that, as a fraction

    @classmethod
    def of(cls, scheme: str) -> Model:
        column_RD = recorded().quantized[CHECKPOINT, scheme]
        mean_D, noise = column_RD.mean(axis=0), draw_noise(column_RD)
        assert noise is not None
        moved_R = column_RD.sum(axis=1) / mean_D.sum()
        residual_RD = column_RD - np.outer(moved_R, mean_D)
        residual_RD *= np.sqrt(len(column_RD) / (len(column_RD) - 1))
        alike = np.sqrt(max(0.0, noise.variance - noise.together))
        return cls(recorded().full[CHECKPOINT], mean_D, residual_RD, float(alike))

    @property
    def error(self) -> float:
        return float(self.mean_D.sum() / self.full_D.sum()) - 1

    def drawn(self, draw: np.random.Generator, which_N: npt.NDArray[np.intp], draws: int) -> Array:
        """Return sums of some documents, (draws, documents)."""
        places = draw.integers(0, len(self.residual_RD), (draws, len(which_N)))
        alike = self.alike * draw.standard_normal((draws, 1))
        return self.mean_D[which_N] * (1 + alike) + self.residual_RD[places, which_N]


@dataclass
class Tally:
    """Counts over trials."""

    held: Counter[str]
    different: Counter[str]
    swapped: Counter[tuple[str, float]]
    inconclusive: Counter[float]
    reached: dict[str, list[float]]
    estimates: dict[str, list[float]]


def outcome(result: Interval, margin: float) -> str:
    """Judge an interval as a gate does."""
    if result.low > margin:
        return "fail"
    return "pass" if result.high <= margin else "inconclusive"


def run(model: Model, documents: int, trials: int, seed: int) -> Tally:
    """Simulate audits of one scheme."""
    draw = np.random.default_rng(seed)
    tally = Tally(Counter(), Counter(), Counter(), Counter(), {}, {})
    for _ in range(trials):
        _trial(model, documents, draw, tally)
    return tally


def _trial(model: Model, documents: int, draw: np.random.Generator, tally: Tally) -> None:
    which_N = draw.integers(0, len(model.full_D), documents)
    full = model.full_D[which_N]
    pick, rival = (model.drawn(draw, which_N, DRAWS) for _ in range(2))
    one, other = (model.drawn(draw, which_N, 1) for _ in range(2))
    known = _known(pick, rival)
    first = pooled((pick, full), excess, noises=(known, None)).interval
    results = {
        "3 draws": first,
        "1 draw, widened": pooled((one, full), excess, noises=(known, None)).interval,
        "1 draw, documents alone": pooled((one, full), excess).interval,
    }
    for name, result in results.items():
        tally.held[name] += result.low <= model.error <= result.high
        tally.reached.setdefault(name, []).append((result.high - result.low) / 2)
        tally.estimates.setdefault(name, []).append(result.estimate)
    for name, a, b in (("1 + 1", one, other), ("3 + 3", pick, rival)):
        result = pooled((a, full, b, full), difference, noises=(known, None) * 2).interval
        tally.different[name] += not result.low <= 0 <= result.high
    anew_N = draw.integers(0, len(model.full_D), documents)
    for name, which in zip(RESCANS, (which_N, anew_N), strict=True):
        again = _scanned(model, draw, which)
        for factor in FACTORS:
            margin = model.error / factor
            pair = {outcome(first, margin), outcome(again, margin)}
            tally.swapped[name, factor] += pair == {"pass", "fail"}
    for factor in FACTORS:
        tally.inconclusive[factor] += outcome(first, model.error / factor) == "inconclusive"


def _scanned(model: Model, draw: np.random.Generator, which_N: npt.NDArray[np.intp]) -> Interval:
    pick, rival = (model.drawn(draw, which_N, DRAWS) for _ in range(2))
    noises = _known(pick, rival), None
    return pooled((pick, model.full_D[which_N]), excess, noises=noises).interval


def _known(*columns: Array) -> DrawNoise:
    """Return what several cells that were drawn several times tell together."""
    noises = [draw_noise(column) for column in columns]
    return combined([noise for noise in noises if noise is not None])


def report_simulated(trials: int) -> Iterator[str]:
    for scheme in SCHEMES:
        model = Model.of(scheme)
        yield (
            f"{scheme}: error {100 * model.error:.2f} %; a draw moves all documents alike by "
            f"{100 * model.alike:.3f} points; {trials} trials each"
        )
        for documents in (32, 64):
            tally = run(model, documents, trials, documents)
            yield f"  {documents} documents"
            for name, held in tally.held.items():
                need = 1.96 * float(np.std(tally.estimates[name]))
                wide = float(np.mean(tally.reached[name])) / need
                yield f"    covered, {name + ':':<25}{share(held, trials)}; wide {wide:.2f}"
            for name, wrong in tally.different.items():
                yield f"    one model, {name}, different:  {share(wrong, trials)}"
            for factor in FACTORS:
                again = "; ".join(
                    f"{name} {share(tally.swapped[name, factor], trials)}" for name in RESCANS
                )
                unclear = 100 * tally.inconclusive[factor] / trials
                yield (
                    f"    error {factor:4.2f} of the margin: inconclusive {unclear:5.1f} %; "
                    f"pass and fail: {again}"
                )


# --------------------------------------------------------------------- nothing simulated


def report_measured() -> Iterator[str]:
    file = recorded()
    for scheme in SCHEMES:
        columns = {s: file.quantized[s, scheme] for s in (CHECKPOINT, SOUP)}
        full, draws = file.full[CHECKPOINT], len(columns[CHECKPOINT])
        groups = [range(k, k + DRAWS) for k in range(0, draws - DRAWS + 1, DRAWS)]
        known = [_known(*(column[list(g)] for column in columns.values())) for g in groups]
        scans = [
            pooled((columns[CHECKPOINT][list(g)], full), excess, noises=(noise, None)).interval
            for g, noise in zip(groups, known, strict=True)
        ]
        error = float(columns[CHECKPOINT].mean(axis=0).sum() / full.sum()) - 1
        swaps = sum(
            {outcome(a, error / factor), outcome(b, error / factor)} == {"pass", "fail"}
            for a, b in combinations(scans, 2)
            for factor in FACTORS
        )
        pairs = list(combinations(range(draws), 2))
        wrong = [0, 0]
        for a, b in pairs:
            cells = (columns[CHECKPOINT][a], full, columns[CHECKPOINT][b], full)
            noise = next(n for g, n in zip(groups, known, strict=True) if a not in g and b not in g)
            for k, noises in enumerate(((), (noise, None) * 2)):
                result = pooled(cells, difference, noises=noises).interval
                wrong[k] += not result.low <= 0 <= result.high
        moved = [column.sum(axis=1) for column in columns.values()]
        yield (
            f"{scheme}, {len(full)} documents, {draws} measured draws: {len(scans)} scans of "
            f"{DRAWS} draws, {swaps} of {len(FACTORS) * len(list(combinations(scans, 2)))} pairs "
            f"pass and fail; of {len(pairs)} pairs of single draws {wrong[1]} differ, by documents "
            f"alone {wrong[0]}; correlation of checkpoint and soup on one text "
            f"{np.corrcoef(*moved)[0, 1]:.2f}"
        )


# --------------------------------------------------------------------- the best of several soups


def report_soups(trials: int) -> Iterator[str]:
    file = recorded()
    full, tokens = file.full[CHECKPOINT], file.tokens
    apart_D = (file.quantized[SOUP, SCHEMES[0]] - file.quantized[CHECKPOINT, SCHEMES[0]]).mean(0)
    scatter = apart_D / tokens - apart_D.sum() / tokens.sum()
    yield f"the best of several soups, 64 documents, {trials} trials each: better than a checkpoint"
    for soups in (1, 4, 10, 30):
        draw, everywhere, held_out = np.random.default_rng(soups), 0, 0
        for _ in range(trials):
            which = draw.integers(0, len(full), 64)
            count = tokens[which]
            own = scatter[draw.integers(0, len(full), (soups, 64))] * count
            best = own[np.argmin(own[:, ::2].sum(axis=1))]
            base = full[which]
            for part in (slice(None), slice(1, None, 2)):
                columns = (base[part] + best[part], base[part], count[part])
                better = interval(columns, change).high < 0
                everywhere += better and part == slice(None)
                held_out += better and part != slice(None)
        yield (
            f"  of {soups:2d}: on all documents {share(everywhere, trials)}; on those it was not "
            f"chosen on {share(held_out, trials)}"
        )


def main() -> None:
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    for lines in (report_simulated(trials), report_measured(), report_soups(trials)):
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
