"""How often a race picks what an exhaustive run would, and for what share of its tokens.

    python -m benchmarks.race AUDIT [TRIALS]

AUDIT is the output folder of a scan of many subjects. Each trial draws the documents of one
course, half to choose on and half to confirm on, in an order of its own, and runs three races
over it: by the schedule alone, by what is shown alone (a share of one), and by both, which is
what `qaudit pick --race` does. The exhaustive run takes the lowest loss on all documents to
choose on. Printed are how often the race picks the same, how often one whose loss there is
within the margin, both with one standard error in points; the share of all evaluation tokens
that it took, on average and in one trial of twenty; and how often each subject was quantized.

- `measured`: all documents of the audit, every quantized scheme in it.
- `six`: six of its subjects, drawn in each trial.
- `closer`: as measured, but every subject's distance to the best divided by ten.
- `level`: the same without any distance: every subject is as good as every other on the text as
  a whole, and an exhaustive run picks among them by luck.
- `large`, `large, closer`, `large, level`: the same with 40 subjects and 800 documents. Documents
  are drawn with replacement; a subject is a mixture of two that were measured, with as much noise
  of its own on each document as sets two finished subjects apart.

Distances are moved by a constant per token, which keeps what documents do to them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from qaudit.judge import race as racing
from qaudit.judge.race import MARGIN, SHARE, Race, RaceCourse
from qaudit.saved.results import measured_in
from qaudit.types import FULL_PRECISION

Array = npt.NDArray[np.float64]
LARGE = (40, 800)


@dataclass(frozen=True, eq=False)
class Losses:
    """Summed losses of K subjects on D documents, and the documents' tokens."""

    nll_KD: Array
    tokens_D: npt.NDArray[np.int64]

    def of(self, subjects: npt.NDArray[np.int64], documents: npt.NDArray[np.int64]) -> Losses:
        """Return some of both."""
        return Losses(self.nll_KD[np.ix_(subjects, documents)], self.tokens_D[documents])

    def closer(self, factor: float) -> Losses:
        """Return the losses with every distance to the best one multiplied."""
        loss_K = self.nll_KD.sum(1) / self.tokens_D.sum()
        moved_K = (1 - factor) * (loss_K - loss_K.min())
        return Losses(self.nll_KD - np.outer(moved_K, self.tokens_D), self.tokens_D)


Draw = Callable[[np.random.Generator], Losses]


def stored(folder: Path) -> dict[str, Losses]:
    """Read every quantized scheme of an audit."""
    found = measured_in(folder / "evidence")
    schemes = dict.fromkeys(m.scheme for m in found if m.scheme != FULL_PRECISION)
    return {
        scheme: Losses(
            np.stack([m.evidence.nll_sum for m in found if m.scheme == scheme]),
            found[0].evidence.tokens,
        )
        for scheme in schemes
    }


def some(losses: Losses, subjects: int, documents: int) -> Draw:
    """Draw subjects and documents anew in each trial, without replacement."""
    every_K, every_D = (np.arange(count) for count in losses.nll_KD.shape)

    def drawn(draw: np.random.Generator) -> Losses:
        return losses.of(
            draw.permutation(every_K)[:subjects], draw.permutation(every_D)[:documents]
        )

    return drawn


def large(losses: Losses, factor: float) -> Draw:
    """Draw more subjects and documents than were measured, like those that were."""
    loss_KD = losses.nll_KD / losses.tokens_D
    first, second = loss_KD[np.argsort(losses.nll_KD.sum(1))[1:3]]  # the best may be a soup
    noise = float((first - second).std()) / math.sqrt(2)

    def drawn(draw: np.random.Generator) -> Losses:
        at_D = draw.integers(0, loss_KD.shape[1], LARGE[1])
        pair_2K = draw.integers(0, len(loss_KD), (2, LARGE[0]))
        part_K1 = draw.random((LARGE[0], 1))
        mixed_KD = part_K1 * loss_KD[pair_2K[0]] + (1 - part_K1) * loss_KD[pair_2K[1]]
        own_KD = noise * draw.standard_normal((LARGE[0], LARGE[1]))
        tokens_D = losses.tokens_D[at_D]
        true_K = (mixed_KD * losses.tokens_D).sum(1) / losses.tokens_D.sum()
        moved_K = (1 - factor) * (true_K - true_K.min())
        nll_KD = (mixed_KD[:, at_D] - moved_K[:, None] + own_KD) * tokens_D
        return Losses(nll_KD, tokens_D)

    return drawn


def cases(folder: Path) -> Iterator[tuple[str, Draw]]:
    """Yield what is raced over."""
    for scheme, losses in stored(folder).items():
        subjects, documents = losses.nll_KD.shape
        yield f"{scheme}, measured", some(losses, subjects, documents)
        yield f"{scheme}, six", some(losses, 6, documents)
        yield f"{scheme}, closer", some(losses.closer(0.1), subjects, documents)
        yield f"{scheme}, level", some(losses.closer(0.0), subjects, documents)
        yield f"{scheme}, large", large(losses, 1.0)
        yield f"{scheme}, large, closer", large(losses, 0.1)
        yield f"{scheme}, large, level", large(losses, 0.0)


def by_schedule(course: RaceCourse, provider: racing.Provider) -> Race:
    """Race by the schedule alone: nothing is shown by an interval that has no end."""

    def blind(*known: object) -> racing.Interval:
        found = measured_behind(*known)  # type: ignore[arg-type]
        return racing.Interval(found.estimate, -math.inf, math.inf)

    measured_behind = racing.ahead_of
    with patch.object(racing, "ahead_of", blind):
        return racing.race(course, provider, margin=0.0)


RULES: dict[str, Callable[[RaceCourse, racing.Provider], Race]] = {
    "schedule": by_schedule,
    "shown": lambda course, provider: racing.race(course, provider, share=1.0),
    "both": racing.race,
}


def trial(losses: Losses) -> dict[str, tuple[float, ...]]:
    """Race by every rule over documents as they were drawn: same, within, tokens, passes."""
    subjects, documents = losses.nll_KD.shape
    names = tuple(map(str, range(subjects)))
    half = np.arange(documents) < (documents + 1) // 2
    every = np.arange(documents)
    course = RaceCourse(names, losses.tokens_D, every[half], every[~half])
    loss_K = losses.nll_KD[:, half].sum(1)
    found = {}
    for rule, run in RULES.items():
        race = run(course, lambda who, at: {s: losses.nll_KD[int(s)][at] for s in who})
        behind = loss_K[int(race.winner or 0)] / loss_K.min() - 1
        passes = sum(len(r.entrants) for r in race.rounds) + 2
        found[rule] = (
            float(behind == 0),
            float(behind <= MARGIN),
            race.tokens / race.exhaustive_tokens,
            passes / subjects,
        )
    return found


def row(values: Array) -> str:
    """Print what many trials gave."""
    shares = []
    for column in values[:, :2].T:
        error = 100 * math.sqrt(max(column.mean() * (1 - column.mean()), 0) / len(column))
        shares.append(f"{100 * column.mean():6.1f} +- {error:.1f}")
    tokens, passes = values[:, 2], values[:, 3].mean()
    worst = 100 * np.quantile(tokens, 0.95)
    return f"{'  '.join(shares)}  {100 * tokens.mean():5.1f}  {worst:5.1f}  {passes:5.2f}"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m benchmarks.race AUDIT [TRIALS]")
    trials = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    print(f"margin {100 * MARGIN:g} %, share {100 * SHARE:g} %, {trials} trials each, in %")
    print(f"{'':36}  same           within margin  tokens  95 %  passes")
    for number, (name, draw) in enumerate(cases(Path(sys.argv[1]))):
        generator = np.random.default_rng([7, number])
        found = [trial(draw(generator)) for _ in range(trials)]
        for rule in RULES:
            values = np.array([one[rule] for one in found])
            print(f"{name:26}{rule:10}{row(values)}", flush=True)


if __name__ == "__main__":
    main()
