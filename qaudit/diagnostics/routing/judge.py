"""How often each layer's router chooses other experts than in full precision, and by how much.

Stream and full precision are compared token by token; the unit stays the document. All intervals
of one subject under one scheme hold at once (Bonferroni over its layers).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qaudit.core import statistics
from qaudit.core.draws import pooled
from qaudit.judge.draw_noise import noise_in, noise_of
from qaudit.judge.fidelity import MEANS, agreement_of, reroutings
from qaudit.judge.table import Cell, Measurements
from qaudit.types import Diagnostics, Finding, Routing, RoutingRow


def judge(table: Measurements, diagnostics: Diagnostics) -> tuple[Diagnostics, tuple[Finding, ...]]:
    rows = tuple(row for cell in table.cells for row in _rows(table, cell))
    return replace(diagnostics, routing=rows), ()


def _rows(table: Measurements, cell: Cell) -> list[RoutingRow]:
    draws = table.draws(*cell)
    routing = [r for draw in draws if (r := draw.evidence.routing) is not None]
    if not routing or len(routing) < len(draws):
        return []
    tokens = draws[0].evidence.tokens
    scored = tokens > 0
    count = tokens[scored].astype(np.float64)
    level = statistics.simultaneous(table.confidence, len(routing[0].blocks))
    mass_of = MEANS["routing_moved"].sums
    noises = [noise_in(noise_of(table, cell, sums=sums)) for sums in (reroutings, mass_of)]

    def row(layer: int, of_draws: list[Routing]) -> RoutingRow:
        rerouted = np.array([count - r.same[layer, scored] for r in of_draws])
        moved = np.array([r.moved[layer, scored] for r in of_draws])
        other, mass = (
            pooled((sums, count), statistics.per_token, level, (noise, None)).interval
            for sums, noise in zip((rerouted, moved), noises, strict=True)
        )
        return RoutingRow(
            subject=cell[0],
            scheme=cell[1],
            spec=draws[0].spec,
            block=int(of_draws[0].blocks[layer]),
            documents=int(scored.sum()),
            tokens=int(tokens.sum()),
            agreement=agreement_of(other),
            moved=MEANS["routing_moved"].bounded(mass),
        )

    return [row(layer, routing) for layer in range(len(routing[0].blocks))]
