"""Sums over the weights of a subject, taken while its schemes quantize them.

The engine passes every group of linears and its quantized weights to an observer, so that nothing
is read for this alone. A scheme that was measured before quantizes again, without an evaluation.
Sums are stored by tensor, those of the weights apart from those of each scheme's perturbation, so
that a further scheme needs that scheme alone.

If the weights of the checkpoint before are on disk, they are read in step, block by block.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import torch

from qaudit.checkpoints.places import folder_of
from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Scheme
from qaudit.core.shipped import Shipped
from qaudit.diagnostics.case import Case, Measure
from qaudit.diagnostics.roles import role_of
from qaudit.diagnostics.weights.parameters import WeightStatistics
from qaudit.diagnostics.weights.sums import RoleSums, difference, relative, sums_of, together
from qaudit.engine.measure import quantize_only
from qaudit.errors import SourceError
from qaudit.model.blocks import Block, BlockModel
from qaudit.model.remote import is_remote
from qaudit.types import Checkpoint, WeightRow, digest

ALWAYS = (3, 4)
"""Bits whose grids are always measured, beside those of the schemes."""

Tensor = tuple[int, str]
"""A block, and the name of a linear in it."""


class WeightWatch:
    """Observes the weights as schemes quantize them, and adds up."""

    def __init__(self, case: Case) -> None:
        self._case = case
        # Shipped files are quantized already: their weights are never seen beside the base's.
        self._schemes = tuple(s for s in case.task.schemes if not isinstance(s, Shipped))
        self._parameters = cast(WeightStatistics, case.parameters)
        self._before = PreviousWeights(case)
        self._sums: dict[Tensor, RoleSums] = {}
        self._moved: dict[str, dict[Tensor, float]] = {}  # by scheme, squared perturbations
        self._read()

    def __call__(self, scheme: Scheme, linears: Linears, quantized: Quantized) -> None:
        moved = self._moved.setdefault(scheme.spec, {})
        for name, weight_RC in linears.weights.items():
            tensor = linears.block, name
            if tensor not in self._sums:
                before_RC = self._before.weight(*tensor)
                self._sums[tensor] = sums_of(weight_RC, self._parameters, self._bits, before_RC)
            moved[tensor] = difference(quantized.weights[name], weight_RC)

    @property
    def unseen(self) -> tuple[Scheme, ...]:
        return tuple(s for s in self._schemes if s.spec not in self._moved)

    def rows(self) -> list[WeightRow]:
        roles = {role_of(name): None for _, name in self._sums}
        everything = tuple(self._sums)
        parts = [
            self._row("role", role, [t for t in everything if role_of(t[1]) == role])
            for role in roles
        ]
        tensors = [
            self._row("tensor", f"{block}.{name}", [(block, name)]) for block, name in everything
        ]
        return [self._row("model", "all", everything), *parts, *tensors]

    def _row(self, part: Any, name: str, tensors: Sequence[Tensor]) -> WeightRow:
        sums = together([self._sums[tensor] for tensor in tensors])
        squares = {
            scheme.short: sum(self._moved[scheme.spec][tensor] for tensor in tensors)
            for scheme in self._schemes
        }
        return WeightRow(
            subject=self._case.subject.label,
            part=part,
            name=name,
            weights=sums.count,
            kurtosis=sums.kurtosis,
            outlier_share=sums.outlier_share,
            effective_range=sums.effective_range,
            grid_distance={str(bits): off for bits, off in sums.grid_distance.items()},
            perturbation=relative(squares, sums.square),
            previous=self._before.label if sums.movement is not None else None,
            movement=sums.movement,
        )

    @property
    def _bits(self) -> tuple[int, ...]:
        return bits_of(self._schemes)

    def _read(self) -> None:
        self._sums = dict(map(_sums_in, self._case.stored("weight-sums", self._key()) or ()))
        for scheme in self._schemes if self._sums else ():
            rows = self._case.stored("perturbations", self._key(scheme))
            if rows is not None:
                self._moved[scheme.spec] = {(r["block"], r["name"]): r["square"] for r in rows}

    def keep(self) -> None:
        """Write the sums, and close the checkpoint before."""
        self._before.close()
        if self._before.checkpoint is None:  # it may have gone halfway
            self._sums = {
                t: replace(s, moved=None, square_before=None) for t, s in self._sums.items()
            }
        rows = [
            {"block": block, "name": name, **asdict(s)} for (block, name), s in self._sums.items()
        ]
        self._case.write("weight-sums", self._key(), rows)
        for scheme in self._schemes:
            if scheme.spec in self._moved:
                moved = self._moved[scheme.spec].items()
                rows = [{"block": b, "name": name, "square": square} for (b, name), square in moved]
                self._case.write("perturbations", self._key(scheme), rows)

    def _key(self, scheme: Scheme | None = None) -> str:
        parameters, task, before = self._parameters, self._case.task, self._before.checkpoint
        if scheme is not None:
            identity = vars(task.identity(scheme, self._case.machine))
            return digest({**identity, "version": parameters.version, "of": "perturbation"})
        return digest({
            "subject": task.subject.content,
            "previous": None if before is None else before.content,
            "dtype": str(self._case.machine.dtype),
            "bits": self._bits,
            "diagnostic": parameters.spec,
            "version": parameters.version,
        })  # fmt: skip


def measure_weights(case: Case) -> list[WeightRow]:
    """Return the rows; schemes that were not observed quantize once more."""
    watch = cast(WeightWatch, case.observer or WeightWatch(case))
    if watch.unseen:
        quantize_only(case.task, watch.unseen, case.machine, case.progress, watch)
    watch.keep()
    return watch.rows()


def bits_of(schemes: Sequence[Scheme]) -> tuple[int, ...]:
    bits = {int(getattr(scheme, "bits", ALWAYS[0])) for scheme in schemes}
    return tuple(sorted(bits.union(ALWAYS)))


def _sums_in(row: Mapping[str, Any]) -> tuple[Tensor, RoleSums]:
    values = {name: value for name, value in row.items() if name not in ("block", "name")}
    grid = {int(bits): total for bits, total in values["grid"].items()}
    return (row["block"], row["name"]), RoleSums(**{**values, "grid": grid})


class PreviousWeights:
    """The weights of the checkpoint before, one block at a time."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.checkpoint: Checkpoint | None = case.previous
        self._blocks: Generator[Block, None, None] | None = None
        self._block: Block | None = None

    @property
    def label(self) -> str | None:
        return None if self.checkpoint is None else self.checkpoint.label

    def weight(self, block: int, name: str) -> torch.Tensor | None:
        """Return the same linear's weight before; None where it cannot be read."""
        if self.checkpoint is None or is_remote(folder_of(self.checkpoint)):
            return None
        try:
            while self._block is None or self._block.index < block:
                self._block = self._next()
            return self._block.weight(name) if self._block.index == block else None
        except (SourceError, OSError, StopIteration, AttributeError):
            self.close()
            self.checkpoint = None  # gone, or not the same architecture
            return None

    def close(self) -> None:
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = self._block = None

    def _next(self) -> Block:
        if self._blocks is None:
            weights, machine = self._case.previous_weights(), self._case.machine
            assert weights is not None and self.checkpoint is not None
            model = BlockModel(
                folder_of(self.checkpoint), weights, dtype=machine.dtype, device=machine.device
            )
            self._blocks = cast(Generator[Block, None, None], model.blocks())
        return next(self._blocks)


MEASURE = Measure(measure_weights, watch=WeightWatch)
