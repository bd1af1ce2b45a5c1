"""The exponential moving average along a run, formed afterwards from what was saved.

m(1) = x(1), m(i) = decay * m(i-1) + (1 - decay) * x(i): `decay` is from one saved checkpoint to
the next, not from step to step, so that the same decay over sparser checkpoints looks further
back. Written out it is one weighted sum, and it is formed as one: no running average is
rounded on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.merges.mean import Mean
from qaudit.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Ema(Mean):
    """Average along the run, each checkpoint counting less than the one after it."""

    decay: float = 0.9

    name: ClassVar[str] = "ema"
    follows_a_run: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise UsageError(
                f"a decay of {self.decay:g} is not between 0 and 1", hint="write `ema:decay=0.9`"
            )

    def shares(self, steps: Sequence[int | None]) -> tuple[float, ...]:
        last = len(steps) - 1
        return tuple(
            self.decay ** (last - n) * (1.0 if n == 0 else 1 - self.decay) for n in range(last + 1)
        )
