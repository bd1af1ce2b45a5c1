"""What a merge is: a frozen dataclass with one verb, as a scheme is.

Its fields are its parameters, its docstring's first line its description, `version` part of
every cache key. A file dropped into `core/merges/` is registered by being there
(`core/registry.py`), and the contract tests run on it with no other edit.

The verb sees one tensor of every member at a time, in the members' order, because weights
are merged while they are streamed: no soup is ever in memory or on disk as a whole. Before
that, and without torch, a merge gives the weight of each candidate: a window takes the
latest few and leaves the others, with a weight of zero.

A merge that is one weighted sum declares it (`as_sum`): then no two members are needed at once,
and they can be added up as they pass by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from qaudit.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class WeightedSum:
    """sum(coefficient * tensor) / divisor, element by element, in the members' order."""

    coefficients: tuple[float, ...]
    divisor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Base of every merge."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    fewest: ClassVar[int] = 2
    most: ClassVar[int | None] = None
    follows_a_run: ClassVar[bool] = False
    """Whether the merge means something over a whole run, with no members named."""

    def merge(
        self,
        tensors: Sequence[Tensor],
        weights: Sequence[float],
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Merge one tensor of every member; without a dtype, into that of the first."""
        raise NotImplementedError

    def as_sum(self, weights: Sequence[float]) -> WeightedSum | None:
        """Return the sum that this merge is for such weights; None: it needs members together."""
        return None

    def shares(self, steps: Sequence[int | None]) -> tuple[float, ...]:
        """Return the weight of each candidate by their steps: equal parts of all."""
        return (1 / len(steps),) * len(steps)

    def accept(self, weights: Sequence[float]) -> None:
        """Refuse weights that a person gave, where the merge has none or they make no sense."""
        raise UsageError(
            f"`{self.name}` takes no weights",
            hint="weights are for `weighted`: `0.9*A+0.1*B`",
        )

    @property
    def spec(self) -> str:
        """Return the canonical form, every parameter spelled out."""
        pairs = (f"{f.name}={str(getattr(self, f.name)).lower()}" for f in fields(self))
        return ":".join([self.name, *pairs])
