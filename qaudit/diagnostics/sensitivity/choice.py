"""Which part of a model a scheme's error comes from, and which bits each part is worth.

One part is quantized at a time and all else left as it is; what that adds to the loss is the
part's contribution. Contributions add up to what everything quantized together adds only as far
as the parts do not act on each other, which is unknown beforehand: so a mixture of bits is
chosen by summed contributions, exactly, and then measured.

The choice is a knapsack with one option per part. Its exact solution is built part by part from
the options that nothing cheaper beats (Nemhauser and Ullmann 1969): a handful of roles leaves a
handful of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from qaudit.diagnostics.roles import role_of

Part = Literal["role", "layers", "all", "mixture"]


@dataclass(frozen=True)
class Variant:
    """A model of which some parts are quantized, each with so many bits."""

    part: Part
    name: str
    bits: tuple[tuple[str, int], ...]  # (role, bits); a role that is not named stays as it is
    blocks: tuple[int, int] | None = None  # from, up to but not with; None: all of them

    def bits_of(self, block: int, linear: str) -> int | None:
        """Return how many bits a linear gets; None: it stays as it is."""
        if self.blocks is not None and not self.blocks[0] <= block < self.blocks[1]:
            return None
        return dict(self.bits).get(role_of(linear))

    @property
    def spec(self) -> str:
        where = "" if self.blocks is None else f"@{self.blocks[0]}..{self.blocks[1]}"
        return ",".join(f"{role}={bits}" for role, bits in sorted(self.bits)) + where


def variants_of(
    roles: Sequence[str], blocks: int, low: int, high: int, layers: int
) -> list[Variant]:
    """Return the variants to measure before a mixture is chosen."""
    alone = [Variant("role", role, ((role, bits),)) for bits in (low, high) for role in roles]
    count = min(layers, blocks)
    edges = [round(k * blocks / count) for k in range(count + 1)] if count > 0 else []
    groups = [
        Variant("layers", f"{a}..{b - 1}", everything(roles, low), (a, b))
        for a, b in pairwise(edges)
    ]
    whole = [Variant("all", f"{bits} bits", everything(roles, bits)) for bits in (low, high)]
    return [*alone, *groups, *whole]


def everything(roles: Sequence[str], bits: int) -> tuple[tuple[str, int], ...]:
    """Return every role with the same bits."""
    return tuple((role, bits) for role in roles)


@dataclass(frozen=True)
class Option:
    """What a part costs with so many bits, and what it then adds to the loss."""

    bits: int
    storage: float  # bits
    loss: float


def cheapest_loss(options: Mapping[str, Sequence[Option]], budget: float) -> dict[str, int] | None:
    """Return for each part its bits, so that the summed loss is least within a budget of storage.

    None: not even the smallest options fit. Of equal losses the one that stores less is taken.
    """
    frontier: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for several in options.values():
        entries = [
            (storage + variant.storage, loss + variant.loss, (*chosen, variant.bits))
            for storage, loss, chosen in frontier
            for variant in several
        ]
        frontier = _unbeaten([entry for entry in entries if entry[0] <= budget])
    if not frontier:
        return None
    best = min(frontier, key=lambda entry: (entry[1], entry[0]))
    return dict(zip(options, best[2], strict=True))


def _unbeaten(
    entries: Sequence[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Return the entries that none with as little storage has less loss than."""
    best: list[tuple[float, float, tuple[int, ...]]] = []
    for entry in sorted(entries):
        if not best or entry[1] < best[-1][1]:
            best.append(entry)
    return best
