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


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate as a function of a counter: linear warm-up, then `after`."""

    peak: float
    warmup: float = 0.0
    warmup_min: float = 0.0

    def at(self, n: float) -> float:
        if n < self.warmup:
            return self.warmup_min + (self.peak - self.warmup_min) * n / self.warmup
        return self.after(n)

    def after(self, n: float) -> float:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Held at the peak for ever."""

    def after(self, n: float) -> float:
        return self.peak


@dataclass(frozen=True, kw_only=True)
class _Decaying(Schedule):
    """From the peak at the end of the warm-up to `floor_ratio * peak` at `end`, then constant."""

    end: float
    floor_ratio: float = 0.1

    @property
    def floor(self) -> float:
        return self.floor_ratio * self.peak

    def part(self, n: float) -> float:
        return min(1.0, (n - self.warmup) / (self.end - self.warmup))


@dataclass(frozen=True, kw_only=True)
class Cosine(_Decaying):
    """Half a cosine from the peak at the end of the warm-up to `floor_ratio * peak` at `end`."""

    def after(self, n: float) -> float:
        cosine = math.cos(math.pi * self.part(n))
        return self.floor + (self.peak - self.floor) * (1 + cosine) / 2


@dataclass(frozen=True, kw_only=True)
class Linear(_Decaying):
    """A straight line from the peak at the end of the warm-up to `floor_ratio * peak` at `end`."""

    floor_ratio: float = 0.0

    def after(self, n: float) -> float:
        return self.peak - (self.peak - self.floor) * self.part(n)


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(Schedule):
    """Held at the peak until `decay_start`, then decayed to `floor` over `decay_length`.

    `shape` names the decay: `linear`, `cosine`, or `sqrt` (one minus the square root).
    """

    decay_start: float
    decay_length: float
    floor: float = 0.0
    shape: str = "linear"

    def __post_init__(self) -> None:
        if self.shape not in _DECAY_SHAPES:
            raise ValueError(f"unknown decay shape `{self.shape}`; known: {sorted(_DECAY_SHAPES)}")

    def after(self, n: float) -> float:
        x = min(1.0, max(0.0, (n - self.decay_start) / self.decay_length))
        return self.floor + (self.peak - self.floor) * _DECAY_SHAPES[self.shape](x)


_DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "sqrt": lambda x: 1.0 - math.sqrt(x),
    "cosine": lambda x: (1.0 + math.cos(math.pi * x)) / 2,
}


@dataclass(frozen=True, kw_only=True)
class HalfCosine(_Decaying):
    """The second half of a cosine: a run that was lengthened goes on from the middle of one.

    The warm-up rises to the middle between peak and floor, where the half begins (OLMo-core's
    `HalfCosWithWarmup`).
    """

    def at(self, n: float) -> float:
        if n < self.warmup:
            return (self.floor + (self.peak - self.floor) / 2) * n / self.warmup
        return self.after(n)

    def after(self, n: float) -> float:
        cosine = math.cos(math.pi * (1 + self.part(n)) / 2)
        return self.floor + (self.peak - self.floor) * (1 + cosine) / 2


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

    def __post_init__(self) -> None:
        _demand("period", self.period, self.period > 0, "above 0")
        _demand("multiplier", self.multiplier, self.multiplier >= 1, "at least 1")
        _demand("peak_decay", self.peak_decay, 0 < self.peak_decay <= 1, "above 0, at most 1")

    def after(self, n: float) -> float:
        floor = self.floor_ratio * self.peak
        cycle, x = self._cycle(n - self.warmup)
        height = max(0.0, self.peak * self.peak_decay**cycle - floor)
        return floor + height * (1 + math.cos(math.pi * x)) / 2

    def _cycle(self, m: float) -> tuple[int, float]:
        if m <= 0:
            return 0, 0.0
        if self.multiplier == 1:
            cycle = max(0, math.ceil(m / self.period) - 1)
            return cycle, min(1.0, m / self.period - cycle)
        cycle, length = 0, self.period
        while m > length:
            m, cycle, length = m - length, cycle + 1, length * self.multiplier
        return cycle, m / length


@dataclass(frozen=True, kw_only=True)
class OscillatoryLockIn(_Decaying):
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

    def __post_init__(self) -> None:
        _demand("period", self.period, self.period > 0, "above 0")
        _demand("amplitude", self.amplitude, 0 <= self.amplitude <= 1, "from 0 to 1")
        _demand("cool_share", self.cool_share, 0 <= self.cool_share < 1, "from 0 to below 1")

    def after(self, n: float) -> float:
        cosine = math.cos(math.pi * self.part(n))
        base = self.floor + (self.peak - self.floor) * (1 + cosine) / 2
        if n >= self.end:
            return base
        phase = (n - self.warmup) / self.period % 1.0 / (1 - self.cool_share)
        bump = (1 - math.cos(2 * math.pi * phase)) / 2 if phase < 1 else 0.0
        return base + self.amplitude * (self.peak - base) * bump


def _demand(name: str, value: float, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` is {value:g}, and it must be {allowed}")


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


def spell(schedule: Schedule) -> dict[str, float | str]:
    """Return the table that `build` makes the schedule from: its kind and its parameters."""
    kind = next(kind for kind, cls in KINDS.items() if cls is type(schedule))
    return {"kind": kind, **{f.name: getattr(schedule, f.name) for f in fields(schedule)}}


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
    schedule = KINDS[kind](**parameters)  # type: ignore[arg-type]
    # A decay that has no length would be divided by.
    end, length = (getattr(schedule, name, None) for name in ("end", "decay_length"))
    if end is not None:
        _demand("end", end, end > schedule.warmup, f"above the warm-up's {schedule.warmup:g}")
    if length is not None:
        _demand("decay_length", length, length > 0, "above 0")
    return schedule
