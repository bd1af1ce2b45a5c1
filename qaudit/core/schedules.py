"""Learning-rate schedules as pure functions of a counter.

A checkpoint's learning rate is never stored beside its weights; it is recomputed from
the schedule its trainer ran. Each class below is one formula as a public training code
writes it, so that a family file can name it and a test can hold it against published values.

The counter `n` is whatever unit the schedule was written in: steps, tokens or samples.
The caller converts. Nothing here is fitted or guessed: a formula that is unknown is absent,
and the card then leaves the learning rate out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields

DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "sqrt": lambda x: 1.0 - math.sqrt(x),
    "cosine": lambda x: (1.0 + math.cos(math.pi * x)) / 2,
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate as a function of a counter: linear warm-up, then `after`."""

    peak: float
    warmup: float = 0.0
    warmup_min: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot be computed: a decay that has no length would be divided by."""
        limits: dict[str, tuple[Callable[[float], bool], str]] = {
            "period": (lambda period: period > 0, "above 0"),
            "multiplier": (lambda multiplier: multiplier >= 1, "at least 1"),
            "peak_decay": (lambda decay: 0 < decay <= 1, "above 0, at most 1"),
            "amplitude": (lambda amplitude: 0 <= amplitude <= 1, "from 0 to 1"),
            "cool_share": (lambda share: 0 <= share < 1, "from 0 to below 1"),
            "end": (lambda end: end > self.warmup, f"above the warm-up's {self.warmup:g}"),
            "decay_length": (lambda length: length > 0, "above 0"),
        }
        for name, (holds, allowed) in limits.items():
            value = getattr(self, name, None)
            if value is not None and not holds(value):
                raise ValueError(f"`{name}` is {value:g}, and it must be {allowed}")
        shape = getattr(self, "shape", "linear")
        if shape not in DECAY_SHAPES:
            raise ValueError(f"unknown decay shape `{shape}`; known: {sorted(DECAY_SHAPES)}")

    def at(self, n: float) -> float:
        if n < self.warmup:
            return self.warmup_min + (self.peak - self.warmup_min) * n / self.warmup
        return self.after(n)

    def after(self, n: float) -> float:
        """Return the rate behind the warm-up: held at the peak for ever."""
        return self.peak


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Held at the peak for ever."""


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from the peak at the end of the warm-up to `floor_ratio * peak` at `end`."""

    end: float
    floor_ratio: float = 0.1

    @property
    def floor(self) -> float:
        return self.floor_ratio * self.peak

    def part(self, n: float) -> float:
        return min(1.0, (n - self.warmup) / (self.end - self.warmup))

    def after(self, n: float) -> float:
        cosine = math.cos(math.pi * self.part(n))
        return self.floor + (self.peak - self.floor) * (1 + cosine) / 2


@dataclass(frozen=True, kw_only=True)
class Linear(Cosine):
    """A straight line from the peak at the end of the warm-up to `floor_ratio * peak` at `end`."""

    floor_ratio: float = 0.0

    def after(self, n: float) -> float:
        return self.peak - (self.peak - self.floor) * self.part(n)


@dataclass(frozen=True, kw_only=True)
class HalfCosine(Cosine):
    """The second half of a cosine: a run that was lengthened goes on from the middle of one.

    The warm-up rises to the middle between peak and floor, where the half begins (OLMo-core's
    `HalfCosWithWarmup`).
    """

    def at(self, n: float) -> float:
        if n < self.warmup:
            return (self.floor + (self.peak - self.floor) / 2) * n / self.warmup
        return super().at(n)

    def part(self, n: float) -> float:
        return (1 + super().part(n)) / 2


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(Schedule):
    """Held at the peak until `decay_start`, then decayed to `floor` over `decay_length`.

    `shape` names the decay: `linear`, `cosine`, or `sqrt` (one minus the square root).
    """

    decay_start: float
    decay_length: float
    floor: float = 0.0
    shape: str = "linear"

    def after(self, n: float) -> float:
        x = min(1.0, max(0.0, (n - self.decay_start) / self.decay_length))
        return self.floor + (self.peak - self.floor) * DECAY_SHAPES[self.shape](x)


@dataclass(frozen=True, kw_only=True)
class NeoxCosine(Schedule):
    """GPT-NeoX's cosine before August 2023: its period counts the warm-up, its end is a floor.

    Pythia was trained with it. The cosine would reach zero at `end` without a warm-up; it is
    cut off at `floor` and held where the warm-up's length is left.
    """

    end: float
    floor: float

    def after(self, n: float) -> float:
        m = min(n, self.end - self.warmup)
        return max(
            self.floor, self.peak / 2 * (1 + math.cos(math.pi * (m - self.warmup) / self.end))
        )


@dataclass(frozen=True, kw_only=True)
class WarmRestarts(Schedule):
    """SGDR (1608.03983): cosines one after the other, each starting anew at the peak.

    The first lasts `period`, every next `multiplier` times as long and starts `peak_decay` times
    as high. A cycle's last point has the floor and the next one is near the peak, so that a
    checkpoint at the end of a cycle is a settled one; torch's scheduler restarts a point earlier.
    """

    period: float
    multiplier: float = 1.0
    peak_decay: float = 1.0
    floor_ratio: float = 0.0

    def after(self, n: float) -> float:
        floor, m = self.floor_ratio * self.peak, n - self.warmup
        cycle, x = 0, 0.0
        if m > 0 and self.multiplier == 1:
            cycle = max(0, math.ceil(m / self.period) - 1)
            x = min(1.0, m / self.period - cycle)
        elif m > 0:
            length = self.period
            while m > length:
                m, cycle, length = m - length, cycle + 1, length * self.multiplier
            x = m / length
        height = max(0.0, self.peak * self.peak_decay**cycle - floor)
        return floor + height * (1 + math.cos(math.pi * x)) / 2


@dataclass(frozen=True, kw_only=True)
class OscillatoryLockIn(Cosine):
    """A cosine with bumps: each period rises towards the peak and settles for its cool share.

    After "When Flat Minima Fail" (2604.15167), which names bump phases and settled cool phases
    and says that the size of the bumps is what matters. It is INFERRED that the phases follow the
    cosine that is the experiment's control, that a bump is a raised cosine, that it comes before
    its cool phase, and how it is measured: `amplitude` is the part of the way from the cosine
    back to the peak, so that 0 is the cosine itself and 1 as high as a warm restart.
    """

    period: float
    amplitude: float = 0.3
    cool_share: float = 0.5

    def after(self, n: float) -> float:
        base = super().after(n)
        if n >= self.end:
            return base
        phase = (n - self.warmup) / self.period % 1.0 / (1 - self.cool_share)
        bump = (1 - math.cos(2 * math.pi * phase)) / 2 if phase < 1 else 0.0
        return base + self.amplitude * (self.peak - base) * bump


KINDS: dict[str, type[Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "half_cosine": HalfCosine,
    "neox_cosine": NeoxCosine,
    "linear": Linear,
    "wsd": WarmupStableDecay,
    "sgdr": WarmRestarts,
    "oli": OscillatoryLockIn,
}


def build(kind: str, **parameters: float | str) -> Schedule:
    if kind not in KINDS:
        raise ValueError(f"unknown schedule `{kind}`; known: {', '.join(KINDS)}")
    allowed = fields(KINDS[kind])
    if unknown := set(parameters) - {field.name for field in allowed}:
        raise ValueError(
            f"schedule `{kind}` has no {sorted(unknown)}; it takes {[f.name for f in allowed]}"
        )
    needed = {field.name for field in allowed if field.default is MISSING}
    if missing := needed - set(parameters):
        raise ValueError(f"schedule `{kind}` needs {sorted(missing)}")
    for name, value in parameters.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name != "shape" and not (is_number and abs(float(value)) < 1e300):
            raise ValueError(f"`{name}` is `{value}`, and it must be a number")
    return KINDS[kind](**parameters)  # type: ignore[arg-type]
