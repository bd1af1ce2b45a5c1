"""WSM (Tian et al., 2507.17634): a weighted mean of a run in place of decaying its learning rate.

With x(0)...x(k) the checkpoints of a run at equal distances and w(1) >= ... >= w(k) what a decay
would have left of the learning rate on the way to each of them,

    x(0) + sum w(i) (x(i) - x(i-1)) = (1 - w(1)) x(0) + sum (w(i) - w(i+1)) x(i) + w(k) x(k):

every decay is a weighted mean, and `linear` is the plain one. The curve is read at i / (k + 1),
so that the learning rate ends above zero and every member counts. The members are those in the
last `duration` steps, both ends included; a window that silently took others would be another
merge, and so would one of unequal distances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from qaudit.core.merges.mean import Mean
from qaudit.errors import UsageError
from qaudit.support.keys import nearest

CURVES: Mapping[str, Callable[[float], float]] = MappingProxyType({
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
})  # fmt: skip
"""What is left of the learning rate after a part of the decay."""


@dataclass(frozen=True, kw_only=True)
class Wsm(Mean):
    """Average the last steps of a held learning rate as a decay over them would have."""

    decay: str = "linear"
    duration: int = 0  # steps from the first member to the last; 0 takes all that are named

    name: ClassVar[str] = "wsm"
    follows_a_run: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.decay not in CURVES:
            raise UsageError(f"there is no decay `{self.decay}`", hint=nearest(self.decay, CURVES))
        if self.duration < 0:
            raise UsageError(
                f"a duration of {self.duration} steps is none", hint="write `wsm:duration=2000`"
            )

    def shares(self, steps: Sequence[int | None]) -> tuple[float, ...]:
        dated = [step for step in steps if step is not None]
        if len(dated) < len(steps) or sorted(set(dated)) != dated:
            named = ", ".join("no step" if step is None else str(step) for step in steps)
            raise UsageError(
                f"`wsm` merges checkpoints of one run, each at a later step; these are at {named}",
                hint="name those of one run: `wsm(A+B+C)`",
            )
        first = self._first(dated)
        members = [step for step in dated if step >= first]
        self._refuse_unequal(members)
        remaining = [CURVES[self.decay](n / len(members)) for n in range(len(members))]
        shares = [
            before - after for before, after in zip(remaining, [*remaining[1:], 0.0], strict=True)
        ]
        return (*[0.0] * (len(dated) - len(members)), *shares)

    def _first(self, steps: Sequence[int]) -> int:
        first = steps[-1] - self.duration if self.duration else steps[0]
        if first not in steps:
            raise UsageError(
                f"there is no checkpoint at step {first}, where `{self.spec}` begins",
                hint=f"take a duration that ends at one of {', '.join(map(str, steps[:-1]))}"
                if len(steps) < 20
                else f"the steps are {steps[0]} to {steps[-1]}; `qaudit series` lists them",
            )
        return first

    def _refuse_unequal(self, members: Sequence[int]) -> None:
        distances = {after - before for before, after in itertools.pairwise(members)}
        if len(distances) > 1:
            raise UsageError(
                f"members of `{self.spec}` are {min(distances)} to {max(distances)} steps apart",
                hint="name members at equal distances: `wsm(A+B+C)`",
            )
