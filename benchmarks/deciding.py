"""How often the command that UNDECIDED prints decides, followed once.

    python -m benchmarks.deciding [TRIALS]

Audits that never existed: documents of the generators of `benchmarks.coverage`, whose true added
loss is a part of the margin. Those that are undecided get the number of documents that their own
hint names, with those that were measured among them, and are judged again. `command` is the share
of undecided audits that get one; the others are at the margin.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.coverage import GENERATORS, truth
from qaudit.core import statistics
from qaudit.core.statistics import documents_to_decide
from qaudit.types import Interval

NAMES = ("lognormal", "skewed", "heavy", "demo-4bit", "demo-3bit")
PARTS = (0.5, 0.7, 0.9, 1.0, 1.1, 1.3)  # of the margin
DOCUMENTS = (32, 64, 128)
LEVEL = statistics.simultaneous(0.95, 2)  # the rules of the policy `release` at level `error`


@dataclass(frozen=True)
class Followed:
    """What became of audits, and of the command that those without a decision printed."""

    undecided: int
    commands: int
    decided: int
    wrong: int  # of all verdicts, of the first and of the second audit, on the other side


def followed(name: str, part: float, documents: int, trials: int, seed: int = 0) -> Followed:
    """Judge new documents, and follow the hint once."""
    margin, make = truth(name)["relative error"] / part, GENERATORS[name]
    draw = np.random.default_rng(seed)
    undecided = commands = decided = wrong = 0
    for _ in range(trials):
        columns = make(draw, documents)
        result = statistics.estimated((columns[1], columns[0]), statistics.excess, LEVEL)
        if outcome(result.interval, margin) is not None:
            wrong += outcome(result.interval, margin) != (part <= 1)
            continue
        undecided += 1
        assert result.spread is not None
        error = result.spread.standard_error
        needed = documents_to_decide(result.interval, error, documents, margin)
        if needed is None:
            continue
        commands += 1
        more = make(draw, needed - documents)
        pair = tuple(np.concatenate([columns[k], more[k]]) for k in (1, 0))
        again = outcome(statistics.interval(pair, statistics.excess, LEVEL), margin)
        decided += again is not None
        wrong += again is not None and again != (part <= 1)
    return Followed(undecided, commands, decided, wrong)


def outcome(interval: Interval, margin: float) -> bool | None:
    """Return whether a verdict is SHIP; None is undecided."""
    if interval.high <= margin:
        return True
    return False if interval.low > margin else None


def table(trials: int) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{trials} audits each, in %: undecided; of these with a command; of these then decided;"
    yield "and wrong verdicts of all"
    yield f"{'generator':<12}{'documents':>10}{'of margin':>10}{'undecided':>11}" + (
        f"{'command':>9}{'decided':>9}{'wrong':>7}"
    )
    for name in NAMES:
        for documents in DOCUMENTS:
            for part in PARTS:
                row = followed(name, part, documents, trials)
                cells = [(row.undecided, trials), (row.commands, row.undecided)]
                cells += [(row.decided, row.commands), (row.wrong, trials)]
                texts = [f"{100 * a / b:.1f}" if b else "-" for a, b in cells]
                yield f"{name:<12}{documents:>10}{part:>10}" + (
                    f"{texts[0]:>11}{texts[1]:>9}{texts[2]:>9}{texts[3]:>7}"
                )


def main() -> None:
    for line in table(int(sys.argv[1]) if len(sys.argv) > 1 else 400):
        print(line, flush=True)


if __name__ == "__main__":
    main()
