"""Bits that differ from linear to linear: a table of them, and the best one within a budget.

Rounding a linear by dW adds to the KL divergence from the model, to second order and with the input
x of a token and the gradient g behind the linear taken for independent of each other,

    1/2 sum over rows r of G_r (dW H dW^T)_rr,   G_r = mean of g_r^2,   H = mean of x x^T

in nats per token, where the labels of the loss are drawn from the model itself, so that G is the
diagonal of the true Fisher matrix. What linears add is summed, and the table has the least sum
whose stored bits stay within the budget: exact up to one linear (a Lagrange multiplier, then the
steps that still fit).

Shapes: R rows, C columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Scheme, Shapes, bit_class_of, limited, one_of
from qaudit.errors import SchemeError, SourceError
from qaudit.support.lazy import Tensor

Table = Mapping[str, str]
"""Bits of each linear as blocks call it, a digit for each block, 0 for none; `*` is any expert."""

Entry = tuple[int, str]
"""A block, and what of it has bits of its own; experts of all blocks may share theirs."""

Options = Mapping[Entry, Mapping[int, tuple[int, float]]]
"""What an entry takes in so many bits: bits of storage, and nats per token."""

FITTED, SCORED = 8192, 4096
"""Tokens of calibration text: more moved the divergence of no mixture of the demo by a percent."""

FUSED, UNTIED = "fused", "none"
NO_TABLE = "none"
DIGITS = "2345678"
"""Bits that a linear can have."""


def any_expert(linear: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", linear)


def bits_in(table: Table, block: int, linear: str) -> int:
    row = table.get(linear) or table.get(any_expert(linear)) or ""
    if row[block : block + 1] not in tuple(DIGITS):
        raise SchemeError(
            f"the table has no bits for `{linear}` of block {block}",
            hint="take a table of a model with the same linears, or give `budget=` alone",
        )
    return int(row[block])


def added_nats(change_RC: Tensor, moment_CC: Tensor, fisher_R: Tensor) -> float:
    """Return what a change of a linear's weights adds, by means over tokens of x x^T and g^2."""
    output_R = ((change_RC @ moment_CC) * change_RC).sum(1)
    return float((output_R.double() * fisher_R.double()).sum()) / 2


def cheapest(options: Options, limit: float) -> dict[Entry, int]:
    """Return bits for each entry, so that the summed nats are least within a limit of storage."""

    def at(price: float) -> dict[Entry, int]:
        return {e: min(o, key=lambda b: (o[b][1] + price * o[b][0], b)) for e, o in options.items()}

    def stored(bits_of: Mapping[Entry, int]) -> int:
        return sum(options[entry][bits][0] for entry, bits in bits_of.items())

    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if stored(at(middle)) > limit else (low, middle)
    chosen = at(high)
    while True:  # what is left buys the steps that are worth most
        room = limit - stored(chosen)
        steps = [
            ((o[chosen[e]][1] - o[b][1]) / (o[b][0] - o[chosen[e]][0]), e, b)
            for e, o in options.items()
            for b in o
            if 0 < o[b][0] - o[chosen[e]][0] <= room and o[b][1] < o[chosen[e]][1]
        ]
        if not steps:
            return chosen
        _, entry, bits = max(steps)
        chosen[entry] = bits


@dataclass(frozen=True, kw_only=True)
class Mixture(Scheme):
    """Round each linear to bits of its own."""

    mixes_bits: ClassVar[bool] = True
    one_width_of_experts: ClassVar[bool] = True  # where they are tied, as transformers reads them
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    remarks: ClassVar[Mapping[str, str]] = {}

    budget: float = 3.5  # stored bits per weight, scales included
    members: str = "34568"
    tie: str = limited(FUSED, one_of("tie", (FUSED, UNTIED), "`tie={}` ties no linears"))
    table: str = NO_TABLE  # a file, and in a plan the hash of its table

    def __post_init__(self) -> None:
        super().__post_init__()
        given = "".join(sorted(set(self.members)))
        if not given or given != self.members or set(given) - set(DIGITS):
            raise SchemeError(
                f"`members={self.members}` names no widths", hint="write digits, as members=2348"
            )
        for bits in self.widths:
            self.member(bits)  # refuses what it does not have
        if not self.widths[0] <= self.budget <= self.widths[-1] + 1:
            raise SchemeError(
                f"a budget of {self.budget:g} bits per weight is not between those of "
                f"{self.widths[0]} and {self.widths[-1]} bits",
                hint="give stored bits per weight, scales included, as budget=3.5",
            )

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(map(int, self.members))

    def member(self, bits: int) -> Scheme:
        """Return the scheme that rounds a linear of so many bits."""
        raise NotImplementedError

    @property
    def calibrates(self) -> bool:
        return True  # text chooses the bits, whatever rounds

    @property
    def bit_class(self) -> str:
        return bit_class_of(int(self.budget), None, self.kv)

    @property
    def title(self) -> str:
        return f"{self.name.removesuffix('-mix').upper()} mixture, {self.budget:g} bits"

    @property
    def short(self) -> str:
        """Return the name with the budget, which a class is not read from."""
        changed = [f for f in fields(self) if f.name == "budget" or self._differs(f)]
        budget_first = sorted(changed, key=lambda f: f.name != "budget")
        return ":".join([self.name, *self._pairs(budget_first)])

    def planned_bits(self, shapes: Shapes, blocks: int) -> float | None:
        return self.budget

    def quantize(self, linears: Linears) -> Quantized:
        """Round each linear to its bits; without a table all to the most that a budget has."""
        within = max(bits for bits in self.widths if bits <= self.budget)
        bits_of = linears.bits or dict.fromkeys(linears.weights, within)
        parts = []
        for bits in sorted(set(bits_of.values())):
            weights = {n: w for n, w in linears.weights.items() if bits_of[n] == bits}
            member = self.member(bits)
            try:
                parts.append(member.quantize(replace(linears, weights=weights, bits=None)))
            except SourceError as error:
                hint = error.hint.replace(member.short, f"`{self.name}`")
                raise type(error)(error.message, hint=hint) from error
        if len(parts) == 1:
            return parts[0]
        return Quantized(
            {name: part.weights[name] for name in linears.weights for part in parts
             if name in part.weights},
            sum(part.bits for part in parts),
            tuple(dict.fromkeys(note for part in parts for note in part.notes)),
            stored={name: stored for part in parts for name, stored in part.stored.items()},
        )  # fmt: skip
