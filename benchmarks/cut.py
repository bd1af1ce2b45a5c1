"""How evenly a plan is cut into parts, and how often parts fetch a checkpoint, by simulation.

    python -m benchmarks.cut

154 checkpoints of 7B, 14B and 32B in bfloat16, and 22 soups of two to four neighbours. On caches of
the nodes a part pays for each of its checkpoints; from a shared cache weights come once, and
arithmetic alone counts. The bound is the work divided by the parts, or the largest unit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from qaudit.executors.folder import FLOPS_PER_BYTE, cut
from qaudit.types import Checkpoint, Pass, Price, Ref, Subject, WeightFile, WorkUnit

GB = 10**9
SIZES = (7, 14, 32)  # billions of parameters
SEEDS = range(20)


def checkpoint(number: int, nbytes: int) -> Checkpoint:
    """Return a checkpoint of one file."""
    files = (WeightFile("model.safetensors", nbytes, f"{number:064x}"),)
    return Checkpoint(Ref("org/model", f"step{number}"), f"step{number}", files)


def unit(subject: Subject, flops: float) -> WorkUnit:
    """Return the work on a subject."""
    return WorkUnit((Pass(subject, ("rtn:bits=4",), price=Price(flops)),))


def alone(one: Checkpoint, flops: float, label: str = "") -> WorkUnit:
    """Return the work on a checkpoint."""
    return unit(Subject(label or one.label, ((one, 1.0),)), flops)


def soup(label: str, members: Sequence[Checkpoint], flops: float) -> WorkUnit:
    """Return the work on the mean of checkpoints."""
    return unit(Subject(label, tuple((c, 1 / len(members)) for c in members), "mean"), flops)


def scan(seed: int = 0) -> list[WorkUnit]:
    """Return 154 checkpoints of three sizes and 22 soups of their neighbours."""
    draw = random.Random(seed)
    series, units, soups = [], [], []
    for number in range(154):
        billions = SIZES[number * len(SIZES) // 154]
        one = checkpoint(number, 2 * billions * GB)
        series.append(one)
        units.append(alone(one, 2e15 * billions * draw.uniform(0.9, 1.1)))
    for number in range(22):
        first = number * 7
        members = series[first : first + draw.randint(2, 4)]
        soups.append(soup(f"soup{number}", members, 2e15 * members[0].nbytes / 2 / GB))
    return units + soups


def cost(part: Sequence[WorkUnit]) -> float:
    """Return what a part costs where it fetches its own checkpoints."""
    nbytes = {c.content: c.nbytes for u in part for c in u.checkpoints}
    return sum(u.flops for u in part) + FLOPS_PER_BYTE * sum(nbytes.values())


def fetched(parts: Sequence[Sequence[WorkUnit]]) -> int:
    """Return how many checkpoints parts fetch, each for itself."""
    return sum(len({c.content for u in part for c in u.checkpoints}) for part in parts)


@dataclass(frozen=True)
class Outcome:
    """How a plan was cut."""

    makespan: float  # of the longest part, against the bound
    fetched: int
    in_turn: int  # fetched, if units were dealt in turn


def outcome(units: list[WorkUnit], count: int, *, shared: bool) -> Outcome:
    """Cut a plan, and compare it with the lower bound."""
    parts = cut(units, count)
    if shared:
        costs = [sum(u.flops for u in part) for part in parts]
        bound = max(sum(costs) / count, max(u.flops for u in units))
    else:
        costs = [cost(part) for part in parts]
        bound = max(cost(units) / count, max(cost((u,)) for u in units))
    in_turn = fetched([units[k::count] for k in range(count)])
    return Outcome(max(costs) / bound, fetched(parts), in_turn)


def main() -> None:
    """Print the table."""
    print("| cache | parts | makespan, against the bound | fetched | dealt in turn |")
    print("|---|---|---|---|---|")
    for shared in (False, True):
        for count in (16, 64):
            every = [outcome(scan(seed), count, shared=shared) for seed in SEEDS]
            spans = sorted(one.makespan for one in every)
            least, most = (f(one.fetched for one in every) for f in (min, max))
            low, high = (f(one.in_turn for one in every) for f in (min, max))
            print(
                f"| {'shared' if shared else 'of the nodes'} | {count} "
                f"| {spans[0]:.2f} to {spans[-1]:.2f} | {least} to {most} | {low} to {high} |"
            )


if __name__ == "__main__":
    main()
