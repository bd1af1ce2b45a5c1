"""Weighted means, and merges that measure the angle between members.

How the sum is formed, and why its bits are the same on every run, is in `core/merge.py`.

`mean` is the uniform soup of Wortsman et al. (2203.05482).

`weighted`: `0.9*A+0.1*B`, as SmolLM3 was released. Weights have to sum to one (a step beyond a
checkpoint, `1.5*B-0.5*A`, does). Proportions are written `weighted:scaled=true(3*A+1*B)` and
divided by their sum; `weighted:free=true` takes any weights as they are, nothing divided.

`ema`, the exponential moving average, is formed afterwards from what was saved: m(1) = x(1),
m(i) = decay * m(i-1) + (1 - decay) * x(i). `decay` is from one saved checkpoint to the next, not
from step to step, so that the same decay over sparser checkpoints looks further back. It is formed
as one weighted sum: no running average is rounded on the way.

`lawa`, latest weight averaging, is the mean of a window that ends at the latest checkpoint. After
Kaddour (2209.14981); the study of quantization and training (2510.06213) takes windows of five, 500
steps apart. With `every` the members are the latest checkpoint and those exactly so many steps
before it: a window that silently took others would be another experiment.

`wsm` (Tian et al., 2507.17634) is a weighted mean in place of decaying the learning rate. With
x(0)...x(k) the checkpoints of a run at equal distances and w(1) >= ... >= w(k) what a decay would
have left of the learning rate on the way to each of them,

    x(0) + sum w(i) (x(i) - x(i-1)) = (1 - w(1)) x(0) + sum (w(i) - w(i+1)) x(i) + w(k) x(k):

every decay is a weighted mean, and `linear` is the plain one. The curve is read at i / (k + 1),
so that the learning rate ends above zero and every member counts. The members are those in the
last `duration` steps, both ends included; a window that silently took others would be another
merge, and so would one of unequal distances.

`slerp` is spherical interpolation of two members, tensor by tensor (Shoemake 1985). The mean of two
directions is shorter than either; on the arc between them the length is kept. sin((1 - t) * angle)
/ sin(angle) of the one and sin(t * angle) / sin(angle) of the other, the angle being that of the
two tensors as vectors. Where they point the same way, or exactly opposite ways, there is no arc and
the straight line is taken.

`stock`, model stock (Jang et al., 2403.19522): how far to go from an anchor to the members' mean.
The first member is the anchor, the checkpoint that the others were trained on from (the end of
stage 1, say). Fine-tuned weights form a thin shell around a centre; the angle between any two of
them, seen from the anchor, gives how far along the way to their mean the centre is: t = N cos / (1
+ (N - 1) cos), tensor by tensor. Members that agree are believed (t = 1), members that went
orthogonal ways are not (t = 0). The cosine is the mean over all pairs; one below zero counts as
zero, since it would be a step backwards from the anchor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from qaudit.core.merge import Counted, Merge, Weights, inner
from qaudit.core.scheme import limited, one_of
from qaudit.errors import UsageError
from qaudit.support.lazy import Tensor


@dataclass(frozen=True, kw_only=True)
class Mean(Merge):
    """Average the members, all alike."""

    name: ClassVar[str] = "mean"


TOLERANCE = 1e-6  # thirds are written with a few digits


@dataclass(frozen=True, kw_only=True)
class Weighted(Mean):
    """Average the members, each with the weight it is given."""

    scaled: bool = False
    free: bool = False

    name: ClassVar[str] = "weighted"

    def __post_init__(self) -> None:
        if self.scaled and self.free:
            raise UsageError(
                "`weighted` cannot be both scaled and free",
                hint="scaled divides by the sum of the weights, free does not: take one",
            )

    def accept(self, weights: Weights) -> None:
        total = math.fsum(weights)
        if not all(math.isfinite(weight) for weight in weights) or total == 0:
            raise UsageError(
                f"weights that sum to {total:g} make no soup", hint="give finite weights"
            )
        if not (self.scaled or self.free) and abs(total - 1) > TOLERANCE:
            raise UsageError(
                f"the weights sum to {total:g}, not to 1",
                hint="write `weighted:scaled=true(...)` for proportions, "
                "or `weighted:free=true(...)` if that sum is meant",
            )

    def coefficients(self, tensors: Sequence[Tensor], weights: Weights) -> Counted:
        return weights, 1.0 if self.free else sum(weights)


@dataclass(frozen=True, kw_only=True)
class Ema(Mean):
    """Average along the run, each checkpoint counting less than the one after it."""

    decay: float = limited(
        0.9,
        (
            lambda decay: 0 < decay < 1,
            "a decay of {:g} is not between 0 and 1",
            "write `ema:decay=0.9`",
        ),
    )

    name: ClassVar[str] = "ema"
    follows_a_run: ClassVar[bool] = True

    def shares(self, steps: Sequence[int | None]) -> tuple[float, ...]:
        shares = [self.decay**n * (1 - self.decay) for n in reversed(range(len(steps)))]
        return (self.decay ** (len(steps) - 1), *shares[1:])


_WINDOW = "write `lawa:k=5` or `lawa:k=5:every=500`"


@dataclass(frozen=True, kw_only=True)
class Lawa(Mean):
    """Average the latest k checkpoints, or k that are so many steps apart."""

    k: int = limited(5, (lambda k: k >= 2, "a window of {} checkpoints is none", _WINDOW))
    every: int = limited(  # steps between members; 0 takes them as they come
        0, (lambda steps: steps >= 0, "a window every {} steps is none", _WINDOW)
    )

    name: ClassVar[str] = "lawa"
    follows_a_run: ClassVar[bool] = True

    def shares(self, steps: Sequence[int | None]) -> tuple[float, ...]:
        if len(steps) < self.k:
            raise UsageError(
                f"a window of {self.k} is longer than the series, which has {len(steps)}",
                hint="name more checkpoints"
                + (f", or write `lawa:k={len(steps)}`" if len(steps) > 1 else ""),
            )
        if not self.every:
            return (0.0,) * (len(steps) - self.k) + (1 / self.k,) * self.k
        latest = steps[-1]
        if latest is None:
            raise UsageError(
                "the latest checkpoint has no step to count back from",
                hint="name the members instead: `A+B+C`",
            )
        wanted = [latest - n * self.every for n in range(self.k)]
        if missing := [step for step in wanted if step not in steps]:
            raise UsageError(
                f"there is no checkpoint at step {missing[0]}, which `{self.spec}` needs",
                hint=f"it would take steps {', '.join(map(str, reversed(wanted)))}",
            )
        chosen = {steps.index(step) for step in wanted}
        return tuple(1 / self.k if n in chosen else 0.0 for n in range(len(steps)))


CURVES: Mapping[str, Callable[[float], float]] = MappingProxyType({
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
})  # fmt: skip
"""What is left of the learning rate after a part of the decay."""


@dataclass(frozen=True, kw_only=True)
class Wsm(Mean):
    """Average the last steps of a held learning rate as a decay over them would have."""

    decay: str = limited("linear", one_of("decay", CURVES, "there is no decay `{}`"))
    duration: int = limited(  # steps from the first member to the last; 0 takes all that are named
        0, (lambda steps: steps >= 0, "a duration of {} steps is none", "write `wsm:duration=2000`")
    )

    name: ClassVar[str] = "wsm"
    follows_a_run: ClassVar[bool] = True

    def shares(self, steps: Sequence[int | None]) -> tuple[float, ...]:
        dated = [step for step in steps if step is not None]
        if len(dated) < len(steps) or sorted(set(dated)) != dated:
            named = ", ".join("no step" if step is None else str(step) for step in steps)
            raise UsageError(
                f"`wsm` merges checkpoints of one run, each at a later step; these are at {named}",
                hint="name those of one run: `wsm(A+B+C)`",
            )
        first = dated[-1] - self.duration if self.duration else dated[0]
        if first not in dated:
            raise UsageError(
                f"there is no checkpoint at step {first}, where `{self.spec}` begins",
                hint=f"take a duration that ends at one of {', '.join(map(str, dated[:-1]))}"
                if len(dated) < 20
                else f"the steps are {dated[0]} to {dated[-1]}; `qaudit series` lists them",
            )
        members = [step for step in dated if step >= first]
        distances = {after - before for before, after in itertools.pairwise(members)}
        if len(distances) > 1:
            raise UsageError(
                f"members of `{self.spec}` are {min(distances)} to {max(distances)} steps apart",
                hint="name members at equal distances: `wsm(A+B+C)`",
            )
        remaining = [CURVES[self.decay](n / len(members)) for n in range(len(members))]
        shares = [before - after for before, after in itertools.pairwise([*remaining, 0.0])]
        return (*[0.0] * (len(dated) - len(members)), *shares)


NO_ARC = 1e-7  # below this sine the two quotients are noise


@dataclass(frozen=True, kw_only=True)
class Slerp(Merge):
    """Go from the first member towards the second on the arc between them."""

    t: float = limited(
        0.5, (lambda t: 0 <= t <= 1, "`t` is {:g}, not within 0 and 1", "write `slerp:t=0.5`")
    )

    name: ClassVar[str] = "slerp"
    most: ClassVar[int | None] = 2

    def shares(self, steps: Sequence[int | None]) -> tuple[float, ...]:
        return (1 - self.t, self.t)

    def coefficients(self, tensors: Sequence[Tensor], weights: Weights) -> Counted:
        if len(tensors) > 2:
            raise UsageError(
                f"`slerp` goes from one member to another, and there are {len(tensors)}",
                hint="use `mean` for more than two",
            )
        t = weights[1] / sum(weights)
        first, second = tensors
        norms = math.sqrt(inner(first, first) * inner(second, second))
        cosine = max(-1.0, min(1.0, inner(first, second) / norms)) if norms > 0 else 1.0
        angle = math.acos(cosine)
        if math.sin(angle) < NO_ARC:
            return (1 - t, t), 1.0
        return [math.sin(part * angle) / math.sin(angle) for part in (1 - t, t)], 1.0


@dataclass(frozen=True, kw_only=True)
class Stock(Merge):
    """Go from the first member, an anchor, towards the mean of the others as far as they agree."""

    name: ClassVar[str] = "stock"
    fewest: ClassVar[int] = 3

    def coefficients(self, tensors: Sequence[Tensor], weights: Weights) -> Counted:
        """Return those of (1 - t) * anchor + t * mean of the others, whatever the weights."""
        if len(tensors) == 2:
            raise UsageError(
                "`stock` needs an anchor and two members or more", hint="or take their `mean`"
            )
        anchor, *members = tensors
        norms = [math.sqrt(inner(member, member, anchor)) for member in members]
        t = 1.0  # of a member that has not moved: nothing to measure an angle by
        if 0.0 not in norms:
            pairs = itertools.combinations(zip(members, norms, strict=True), 2)
            cosines = [inner(a, b, anchor) / (of_a * of_b) for (a, of_a), (b, of_b) in pairs]
            cosine = min(1.0, max(0.0, math.fsum(cosines) / len(cosines)))
            t = len(members) * cosine / (1 + (len(members) - 1) * cosine)
        return (1 - t, *[t / len(members)] * len(members)), 1.0
