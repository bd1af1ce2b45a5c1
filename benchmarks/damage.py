"""What a draw of calibration text moves, by how much damage the scheme does.

    python -m benchmarks.damage           # prints damage.txt
    python -m benchmarks.damage OUT.npz   # measures what it is made of

`damage.npz` is what one machine measured of the demo at gptq-3bit: every checkpoint of its series
and the soup, with five draws of calibration text that share no document. Between subjects the
scheme adds from less than 1 % to 7 % to the loss.

- what a single draw moves the loss by, as a power of the loss that is added.
- whether an interval holds that one draw has alone, widened by three draws of two other subjects
  (`qaudit.judge.draw_noise`): every subject, with every pair of others and each draw as the single
  one. The true value is the mean of its other draws on the same documents, so that nothing but the
  noise of draws is judged. By the ratio of the added loss to that of the two others, for three
  rules: as a fraction of the loss, in proportion to the added loss, and the product's own.

Few subjects and draws are shared by many trials: shares are of these, and have no error of their
own.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
from scipy import special

from benchmarks.clock import ROOT
from benchmarks.evidence import commit
from qaudit.core.draws import DrawNoise, combined, draw_noise
from qaudit.core.statistics import interval
from qaudit.judge.draw_noise import carried
from qaudit.saved.results import measured_in
from qaudit.types import FULL_PRECISION

Array = npt.NDArray[np.float64]
HERE = Path(__file__).parent / "damage.npz"
COMMAND = "qaudit scan demo --schemes gptq-3bit --repeats 5"
DRAWS = 3  # of each of two others
RATIOS = {"less than 2/3": (0.0, 2 / 3), "2/3 to 3/2": (2 / 3, 1.5), "more": (1.5, np.inf)}


@dataclass(frozen=True, eq=False)
class Subject:
    """What was measured of one subject."""

    label: str
    draws_RD: Array
    full_D: Array

    @property
    def added(self) -> float:
        """The share of its loss that quantization added."""
        return float(1 - self.full_D.sum() / self.draws_RD.mean(axis=0).sum())

    @property
    def far(self) -> float:
        """The far end of the interval of that."""
        columns = self.draws_RD.mean(axis=0), self.full_D
        result = interval(columns, lambda total: 1 - total[1] / total[0])
        return max(abs(result.low), abs(result.high))

    def noise(self, rows: npt.NDArray[np.intp] | None = None) -> DrawNoise:
        noise = draw_noise(self.draws_RD if rows is None else self.draws_RD[rows])
        assert noise is not None
        return noise


Rule = Callable[[DrawNoise, float, float], DrawNoise]
RULES: dict[str, Rule] = {
    "a fraction of the loss": lambda noise, damage, other: noise,
    "in proportion to the added loss": lambda noise, damage, other: noise.times(other / damage),
    "the product's": carried,
}


def recorded(path: Path = HERE) -> list[Subject]:
    """Read what was measured."""
    with np.load(path, allow_pickle=False) as arrays:
        about = json.loads(str(arrays["about"]))
        rows = zip(about["subjects"], arrays["quantized"], arrays["full"], strict=True)
        return [Subject(label, draws.astype(float), full) for label, draws, full in rows]


def power_of(subjects: list[Subject]) -> tuple[float, float]:
    """Return the power of the added loss by which draws scatter, and its standard error."""
    x, y = (np.log([f(one) for one in subjects]) for f in (lambda s: s.added, scatter))
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    rest = y - y.mean() - slope * x
    return slope, float(np.sqrt(rest @ rest / (len(x) - 2) / (x @ x)))


def scatter(one: Subject) -> float:
    """Return the standard deviation of one draw, as a fraction of the loss."""
    return float(np.sqrt(one.noise().variance))


def covered(subjects: list[Subject], rule: Rule) -> dict[str, tuple[float, float, int]]:
    """Return by the ratio of damage how many intervals hold, their width and their number.

    The width is the median of the standard deviation that they take for the one measured.
    """
    held: dict[str, list[tuple[bool, float]]] = {name: [] for name in RATIOS}
    draw = np.random.default_rng(0)
    for one in subjects:
        moved_R = one.draws_RD.sum(axis=1) / one.draws_RD.mean(axis=0).sum()
        own = scatter(one)
        for pair in combinations([other for other in subjects if other is not one], 2):
            ratio = one.added / np.sqrt(pair[0].added * pair[1].added)
            (name,) = (n for n, (low, high) in RATIOS.items() if low <= ratio < high)
            for k, single in enumerate(moved_R):
                rows = [draw.permutation(len(other.draws_RD))[:DRAWS] for other in pair]
                noise = combined(
                    [
                        rule(other.noise(which), other.far, one.far)
                        for other, which in zip(pair, rows, strict=True)
                    ]
                )
                rest = np.delete(moved_R, k)
                sure = np.sqrt(noise.variance * (1 + 1 / len(rest)))
                reach = special.stdtrit(noise.freedom, 0.975) * sure
                inside = bool(abs(single - rest.mean()) <= reach)
                held[name].append((inside, float(np.sqrt(noise.variance)) / own))
    return {
        name: (
            float(np.mean([i for i, _ in all_])),
            float(np.median([w for _, w in all_])),
            len(all_),
        )
        for name, all_ in held.items()
    }


def report() -> Iterator[str]:
    subjects = recorded()
    documents = len(subjects[0].full_D)
    draws = len(subjects[0].draws_RD)
    yield f"{len(subjects)} subjects at gptq-3bit, {draws} draws, {documents} documents"
    yield "  added loss, %   one draw moves it by, %"
    for one in sorted(subjects, key=lambda each: each.added):
        yield f"  {100 * one.added:12.2f}   {100 * scatter(one):23.3f}   {one.label}"
    slope, error = power_of(subjects)
    yield f"as a power of the added loss: {slope:.2f} +- {error:.2f}"
    yield "widened by three draws of two others; held, % (width), by the ratio of damage"
    for name, rule in RULES.items():
        results = covered(subjects, rule)
        cells = (f"{k}: {100 * held:.1f} ({wide:.2f})" for k, (held, wide, _) in results.items())
        yield f"  {name + ',':<33}{'; '.join(cells)}"


def collect(folder: Path) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays of a scan's evidence."""
    full, drawn = {}, {}
    for m in sorted(measured_in(folder), key=lambda m: m.calibration_seed):
        if m.scheme == FULL_PRECISION:
            full[m.subject] = m.evidence.nll_sum
        else:
            drawn.setdefault(m.subject, []).append(m.evidence.nll_sum)
    draws = min(map(len, drawn.values()))
    labels = sorted(drawn)
    about = {"command": COMMAND, "subjects": labels, "commit": commit()}
    return {
        "quantized": np.array([drawn[label][:draws] for label in labels], dtype=np.float64),
        "full": np.array([full[label] for label in labels], dtype=np.float64),
        "about": np.array(json.dumps(about)),
    }


def main() -> None:
    if len(sys.argv) < 2:
        for line in report():
            print(line, flush=True)
        return
    with TemporaryDirectory() as folder:
        words = [*shlex.split(COMMAND)[1:], "--out", folder]
        subprocess.run([sys.executable, "-m", "qaudit", *words], cwd=ROOT, check=True)
        arrays = collect(Path(folder) / "evidence")
    with Path(sys.argv[1]).open("wb") as file:
        np.savez_compressed(file, **arrays)
    print(f"wrote {sys.argv[1]}")


if __name__ == "__main__":
    main()
