"""BASE-Q: take what rotations leave between channels out of what is rounded (2506.15689).

`base-q-w4a4` is QuaRot's folds and rotations, and three things that are learned a block at a time,
half of `steps` before the weights are rounded and half behind it, on the squared error of what the
block returns (`qaudit/core/learned.py`):

1. scales that two linears share, v with o and up with down, and a rotation of each head's values,
   with weights rounded meanwhile. All of it is folded into the weights.
2. Weights are rounded by GPTQ, columns by falling diagonal, scales by `quarot`'s search.
3. What linears read, with weights as they are rounded:  Q(x a - b) + b. The bias b of each column
   takes out what a rotation leaves of their means; b W^T is a bias of the linear. The scale a is
   not taken back in the weights, and makes up for what clipping takes. Q has one grid a token, over
   a learned share of its range.

Rates are those of the authors' code; a bias is counted in root mean squares of what is read, so
that they fit inputs of any size. Simplified: a block learns on its own stream, GPTQ's statistics
are taken before the first linear of a block is rounded, and a cache (`kv=int4`, as published) is
rounded behind fixed rotations, as with `quarot`. Steps of rotations are Cayley's. Biases are
counted as bits, and scales where no norm has room for them.

Shapes: R rows, C columns, K heads of values, W the width of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from qaudit.core.grid import fit, fit_share
from qaudit.core.learned import LARGEST_SHARE, best_shares, descend, snap_through
from qaudit.core.linears import (
    Inputs,
    Linears,
    Quantize,
    Quantized,
    Rows,
    WholeBlock,
    alone,
    refuse_nonfinite,
    required_inputs,
)
from qaudit.core.rotation import rotate, rotate_rows, rotation
from qaudit.core.scheme import Calibration, Scheme
from qaudit.core.schemes.quarot import CACHE_CLIP, round_columns
from qaudit.support.lazy import Tensor, torch

BITS = 4
SCALES, BIASES, CLIPS = 3e-3, 2e-3, 3e-2  # first rates


@dataclass(frozen=True, kw_only=True)
class BaseQ(Scheme):
    """Learn biases, scales and clipping of inputs behind rotations, in two stages (BASE-Q)."""

    name: ClassVar[str] = "base-q-w4a4"
    calibration: ClassVar[Calibration] = Calibration.WHOLE_BLOCK
    code_bits: ClassVar[int | None] = BITS
    act_bits: ClassVar[int | None] = BITS
    rounds_columns: ClassVar[bool] = True
    transforms_inputs: ClassVar[bool] = True
    rotates_outputs: ClassVar[bool] = True
    rotates_heads: ClassVar[bool] = True
    cache_clip: ClassVar[float] = CACHE_CLIP

    steps: int = 150

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        return self.train(alone(linears, self.name))(linears)

    def train(self, block: WholeBlock) -> Quantize:
        groups = block.calibrated()
        for linears in groups:
            refuse_nonfinite(linears)
        block = replace(block, groups=groups)
        turns = {}
        for linears in groups:
            source = linears.fold_source
            if source is None or source.is_norm or linears.fold_C is None:
                continue
            if rows := (linears.rows or {}).get(source.name):  # of values, read head by head
                turns[source.name] = Turns.start(linears, rows)
        bases = [Basis(linears, turns) for linears in groups]
        if any([*basis.free, *basis.turns] for basis in bases):
            descend(block, bases, self.steps // 2)
        readings = [self._rounded(basis) for basis in bases]
        descend(block, readings, self.steps - self.steps // 2)
        learned = {tuple(reading.basis.weights): reading.end() for reading in readings}
        return lambda linears: learned[tuple(linears.weights)]

    def _rounded(self, basis: Basis) -> RoundedInputs:
        given = required_inputs(basis.linears, self.name)
        inputs = Inputs(basis.of_gram(given.gram_CC), given.absmean_C, given.tokens)
        weights = {name: basis.of_weight(name) for name in basis.weights}
        turned = replace(basis.linears, weights=weights, inputs=inputs, fold_C=None)
        return RoundedInputs(basis, round_columns(turned, BITS, damp=0.01, act_order=True), inputs)


@dataclass(frozen=True, eq=False)
class Turns:
    """A rotation of the values of each head, in v's rows and in o's columns."""

    each: Sequence[Tensor]  # (W, W)
    rows: Rows
    of_head: Sequence[int]  # which of them each head of o's columns reads

    @classmethod
    def start(cls, reader: Linears, rows: Rows) -> Turns:
        assert reader.fold_C is not None
        first = rotation(rows.width).to(next(iter(reader.weights.values())).device, torch.float32)
        each = [first.clone() for _ in range(rows.start, rows.stop, rows.width)]
        return cls(each, rows, (reader.fold_C[:: rows.width] // rows.width).tolist())

    def of_columns(self, x: Tensor) -> Tensor:
        turn_KWW = torch.stack([self.each[head] for head in self.of_head])
        heads = x.unflatten(-1, (len(self.of_head), 1, self.rows.width))
        turned: Tensor = (heads @ turn_KWW.mT.to(x.dtype)).flatten(-3)
        return turned

    def of_rows(self, weight_RC: Tensor, *, back: bool = False) -> Tensor:
        turn_KWW = torch.stack([*self.each]).to(weight_RC.dtype)
        before, part, behind = weight_RC.tensor_split([self.rows.start, self.rows.stop])
        part = (turn_KWW.mT if back else turn_KWW) @ part.unflatten(0, (-1, self.rows.width))
        return torch.cat([before, part.flatten(0, 1), behind])


class Basis:
    """A group behind folds and rotations, which leave its products and what is rounded alone."""

    def __init__(self, linears: Linears, turns: Mapping[str, Turns]) -> None:
        self.linears = linears
        self.weights = dict(linears.widened())
        self.norm_C = linears.norm_C
        if self.norm_C is not None:  # weights there multiply zeros
            self.norm_C = torch.where(self.norm_C == 0, 1.0, self.norm_C.float())
        source = linears.fold_source
        self._read = None if source is None else turns.get(source.name)
        self._written = {name: turns[name] for name in self.weights if name in turns}
        rows = linears.rows or {}
        self._rows = {n: rows[n] for n in self.weights if n in rows and n not in turns}
        index_C = linears.fold_C
        shares = index_C is not None and not linears.fold_is_norm
        count = int(index_C.max()) + 1 if index_C is not None and shares else 0
        first = next(iter(self.weights.values()))
        self._index_C = None if index_C is None else index_C.to(first.device)
        self._log_scale = first.new_zeros(count, dtype=torch.float32)
        self._shares: dict[str, Tensor] = {}
        self.free = [(self._log_scale, SCALES)] if count else []
        self.turns: Sequence[Tensor] = () if self._read is None else self._read.each

    def inputs(self, x: Tensor) -> Tensor:
        return self._turned(x if self.norm_C is None else x / self.norm_C.to(x.dtype), 1)

    def of_weight(self, name: str) -> Tensor:
        """Return a weight as it is rounded."""
        weight_RC = self.weights[name]
        if self.norm_C is not None:
            weight_RC = weight_RC * self.norm_C
        weight_RC = self._turned(weight_RC, -1)
        if name in self._written:
            return self._written[name].of_rows(weight_RC)
        return rotate_rows(weight_RC, self._rows[name]) if name in self._rows else weight_RC

    def outwards(self, name: str, weight_RC: Tensor) -> Tensor:
        """Turn rows back: what a weight adds is then in the model's own basis."""
        if name in self._written:
            return self._written[name].of_rows(weight_RC, back=True)
        return rotate_rows(weight_RC, self._rows[name]) if name in self._rows else weight_RC

    def of_gram(self, gram_CC: Tensor) -> Tensor:
        turned_CC = self.inputs(self.inputs(gram_CC).T.contiguous())
        return (turned_CC + turned_CC.T) / 2

    def quantized(self) -> Quantized:
        """Return the group with weights rounded to nearest."""
        weights = {}
        for name in self.weights:
            weight_RC = self.of_weight(name)
            if name not in self._shares:
                self._shares[name] = best_shares(weight_RC.detach(), BITS)
            grid = fit_share(weight_RC, BITS, self._shares[name], scale_dtype="bf16")
            weights[name] = self.outwards(name, snap_through(weight_RC, grid))
        return Quantized(weights, 0, inputs=lambda x: self.inputs(x.float()).to(x.dtype))

    def _turned(self, x: Tensor, power: int) -> Tensor:
        """Multiply columns by the scales, or divide them, and turn them."""
        if len(self._log_scale) == 0:
            return rotate(x)
        scale_C = (power * self._log_scale).exp()[self._index_C].to(x.dtype)
        return rotate(x * scale_C) if self._read is None else self._read.of_columns(x) * scale_C


class RoundedInputs:
    """How the inputs of a group with rounded weights are rounded."""

    turns: Sequence[Tensor] = ()

    def __init__(self, basis: Basis, rounded: Quantized, inputs: Inputs) -> None:
        self.basis, self._rounded = basis, rounded
        mean_square = float(inputs.gram_CC.diagonal().mean()) / inputs.tokens
        self._unit = max(mean_square, 1e-12) ** 0.5
        self.bias_C = torch.zeros_like(inputs.absmean_C, dtype=torch.float32)
        self.log_scale_C = torch.zeros_like(self.bias_C)
        self.clip = torch.logit(self.bias_C.new_full((), LARGEST_SHARE))
        self.free = [(self.bias_C, BIASES), (self.log_scale_C, SCALES), (self.clip, CLIPS)]
        self._weights = {
            name: basis.outwards(name, weight_RC) for name, weight_RC in rounded.weights.items()
        }

    def inputs(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        bias_C = (self._unit * self.bias_C).to(wide.dtype)
        moved = self.basis.inputs(wide) * self.log_scale_C.exp().to(wide.dtype) - bias_C
        share = torch.sigmoid(self.clip)
        grid = fit(moved, BITS, symmetric=False, dim=-1, shares=(share, share))
        read: Tensor = (snap_through(moved, grid) + bias_C).to(x.dtype)
        return read

    def quantized(self) -> Quantized:
        return Quantized(self._weights, 0, inputs=self.inputs)

    def end(self) -> Quantized:
        weights = {
            name: self._weights[name].to(given.dtype)
            for name, given in self.basis.linears.weights.items()
        }
        columns = 16 * self.bias_C.numel()
        bits = self._rounded.bits + (columns if self.basis.norm_C is not None else 2 * columns)
        return replace(self._rounded, weights=weights, bits=bits, inputs=self.inputs)
