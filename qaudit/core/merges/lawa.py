"""LAWA, latest weight averaging: the mean of a window that ends at the latest checkpoint.

After Kaddour (2209.14981); the study of quantization and training (2510.06213) takes windows of
five, 500 steps apart. With `every` the members are the latest checkpoint and those exactly so
many steps before it: a window that silently took others would be another experiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qaudit.core.merges.mean import Mean
from qaudit.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Lawa(Mean):
    """Average the latest k checkpoints, or k that are so many steps apart."""

    k: int = 5
    every: int = 0  # steps between members; 0 takes them as they come

    name: ClassVar[str] = "lawa"
    follows_a_run: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.k < 2 or self.every < 0:
            raise UsageError(
                f"a window of {self.k} checkpoints every {self.every} steps is none",
                hint="write `lawa:k=5` or `lawa:k=5:every=500`",
            )

    def shares(self, steps: Sequence[int | None]) -> tuple[float, ...]:
        if len(steps) < self.k:
            raise UsageError(
                f"a window of {self.k} is longer than the series, which has {len(steps)}",
                hint="name more checkpoints"
                + (f", or write `lawa:k={len(steps)}`" if len(steps) > 1 else ""),
            )
        chosen = self._spaced(steps) if self.every else set(range(len(steps) - self.k, len(steps)))
        return tuple(1 / self.k if n in chosen else 0.0 for n in range(len(steps)))

    def _spaced(self, steps: Sequence[int | None]) -> set[int]:
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
        return {steps.index(step) for step in wanted}
