"""Rotate inputs and weights so that nothing stands out, then round both to few bits.

**QuaRot**: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2404.00456).
`quarot` rounds weights by GPTQ, `quarot-rtn` to nearest; both round activations by token,
symmetric, with the largest magnitude of a token cut to 0.9 of itself, as published. `rotate=false`
is the same without rotations: what integers of four bits do by themselves. `act=16` leaves
activations as they are. `search=false` leaves out the search for the scales of weights.

Exact: what is rounded is what QuaRot rounds, whether a rotation is folded or online
(`qaudit/core/rotation.py`): inputs without the weight of the norm in front, outputs that a block
lets one rotate, cached keys and values (`kv=int4`) behind R3 and R2, their ranges cut to 0.95. A
scale of weights is the best of 80, one a row (`--w_clip`, `qaudit/core/grid.py`). A post-norm
model has no free R1: it is rotated in front of each linear, and a note says so.

Simplified:
- rotations are Walsh-Hadamard beside Hartley, fixed, where QuaRot has random signs and tables.
- statistics of GPTQ are of inputs that are rotated and not rounded; blocks before are rounded.
- a group of a cache is a head, also where a head has more than the 128 numbers of a group there.

**FlatQuant, SpinQuant, OSTQuant and BASE-Q**, each learned one block at a time.

What they have in common is in `qaudit/core/rotation.py`: a transformation in front of the linears
that read one input, all of a block learned together, so that what the rounded block returns is near
what the block of the unquantized model returns. `steps` says for how long; the same text and steps
give the same bits.

- `flatquant` (Sun et al., 2410.09426): an affine Kronecker product, a scale of each column that
  begins at SmoothQuant's with alpha 0.3, and shares of the ranges of tokens and of each row of a
  weight, by Adam at 5e-3 (shares at 5e-2), as published. Weights are rounded to nearest.
- `spinquant` (Liu et al., 2405.16406): a rotation, by Cayley steps, with tokens rounded and weights
  as they are meanwhile, as published; then GPTQ.
- `ostquant` (Hu et al., 2501.13987): a rotation and a scale of each column, with both rounded
  meanwhile; then GPTQ.

Simplified: FlatQuant's shares begin where a search puts them, not at 0.98, and it learns for fewer
steps. SpinQuant and OSTQuant are published with the loss of the whole model and rotations that
blocks share; here each block learns on its own output. Rotations are Kronecker products, online in
front of each group, where theirs are folded into the residual and the heads. GPTQ's scales are
those of `quarot`'s search. Matrices and scales are counted as bits; SpinQuant has no scales.
Caches: `kv=int4`, rotated as `quarot` does.

**BASE-Q**: take what rotations leave between channels out of what is rounded (2506.15689).

`base-q-w4a4` is QuaRot's folds and rotations, and three things that are learned a block at a time,
half of `steps` before the weights are rounded and half behind it, on the squared error of what the
block returns (`qaudit/core/rotation.py`):

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
from functools import partial
from typing import Any, ClassVar

from qaudit.core.floats import round_tokens
from qaudit.core.grid import fit, fit_searched, fit_share, group_notes, quantize_groups
from qaudit.core.linears import (
    Inputs,
    Linears,
    Quantize,
    Quantized,
    Rows,
    StoredWeight,
    WholeBlock,
    decoded,
    largest_inputs,
    refuse_nonfinite,
    required_inputs,
    store_each,
)
from qaudit.core.rotation import (
    LARGEST_SHARE,
    Goal,
    Learner,
    Transform,
    best_shares,
    descend,
    fused,
    learn,
    rotate,
    rotate_rows,
    rotation,
    snap_through,
)
from qaudit.core.scheme import UNROUNDED, Calibration, Scheme
from qaudit.core.schemes.gptq import Gptq
from qaudit.core.schemes.w8a8 import smoothing_scales
from qaudit.support.lazy import Tensor, torch

CACHE_CLIP = 0.95


def round_columns(
    linears: Linears, bits: int, *, group: int = -1, search: bool = True, **settings: Any
) -> Quantized:
    """Round by GPTQ onto symmetric grids whose scales are the best of several shares of a range."""
    rounding = Gptq(bits=bits, group=group, act_group_aware=False, **settings)
    return rounding.rounded(linears, partial(fit_searched, bits=bits, dim=0, search=search))


@dataclass(frozen=True, kw_only=True)
class QuarotNearest(Scheme):
    """Rotate, then round weights to nearest and activations by token."""

    name: ClassVar[str] = "quarot-rtn"
    version: ClassVar[int] = 3
    cache_clip: ClassVar[float] = CACHE_CLIP

    bits: int
    act: int = 4
    group: int = -1
    clip: float = 0.9
    search: bool = True
    rotate: bool = True

    @property
    def rotates_outputs(self) -> bool:
        """Round v, and what writes to the residual, in rotated rows where a block allows it."""
        return self.rotate

    @property
    def rotates_heads(self) -> bool:
        """Round keys behind R3 and values behind R2, as published."""
        return self.rotate

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        if not self.rotate:
            rounded = None if self.act == UNROUNDED else self._rounded
            return replace(self._round(linears), inputs=rounded)
        basis = fused(linears)
        quantized = self._round(basis.linears)
        made = quantized.weights
        weights = {n: basis.outwards(n, made[n]).to(w.dtype) for n, w in linears.weights.items()}
        notes = quantized.notes
        if linears.rows is not None and not any(
            r.start == 0 and r.stop == r.width for r in linears.rows.values()
        ):
            missing = "no rotation of the residual is free in this model"
            notes += (f"{missing}: each is in front of its linears",)

        def inputs(x: Tensor) -> Tensor:
            return self._rounded(basis.inputs(x)).to(x.dtype)

        return replace(quantized, weights=weights, inputs=inputs, notes=notes)

    def _round(self, linears: Linears) -> Quantized:
        lay = partial(fit_searched, bits=self.bits, dim=-1, search=self.search)
        store = partial(quantize_groups, bits=self.bits, group=self.group, lay=lay)
        return store_each(linears, store, group_notes(linears.columns, self.group))

    def _rounded(self, x: Tensor) -> Tensor:
        if self.act == UNROUNDED:
            return x
        return round_tokens(x.float(), self.act, self.clip).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Quarot(QuarotNearest):
    """Rotate, then round weights by GPTQ and activations by token (QuaRot)."""

    name: ClassVar[str] = "quarot"
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM
    rounds_columns: ClassVar[bool] = True

    damp: float = 0.01

    def _round(self, linears: Linears) -> Quantized:
        return round_columns(
            linears, self.bits, group=self.group, search=self.search, damp=self.damp
        )


Stored = tuple[Mapping[str, StoredWeight], tuple[str, ...]]
"""What a file holds of each linear, and notes."""
ALPHA = 0.3  # of SmoothQuant's scales, where FlatQuant begins
CLIP = 0.9  # share of the range of tokens, where FlatQuant begins


@dataclass(frozen=True, kw_only=True)
class FlatQuant(Scheme):
    """Learn an affine transformation of each input, then round to nearest (FlatQuant)."""

    name: ClassVar[str] = "flatquant"
    version: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = Calibration.WHOLE_BLOCK
    transforms_inputs: ClassVar[bool] = True
    rotates_heads: ClassVar[bool] = True
    goal: ClassVar[Goal] = Goal(orthogonal=False, scaling=True, clipping=True)

    bits: int
    act: int = 4
    steps: int = 150

    def train(self, block: WholeBlock) -> Quantize:
        groups = self._groups(block)
        refuse_nonfinite(*groups)
        turns = learn(replace(block, groups=groups), self._start, self._goal, self.steps)
        by_names = {tuple(g.weights): turn for g, turn in zip(groups, turns, strict=True)}
        return lambda linears: self._apply(linears, by_names[tuple(linears.weights)])

    def _apply(self, linears: Linears, turn: Transform) -> Quantized:
        refuse_nonfinite(linears)
        wide = {name: w.detach().float().contiguous() for name, w in linears.weights.items()}
        turned = {name: turn.of_weights(weight_RC) for name, weight_RC in wide.items()}
        stored, notes = self._round(linears, turned, turn)

        def inputs(x: Tensor) -> Tensor:
            turned = turn.of_inputs(x.float())
            return round_tokens(turned, self.act, float(turn.token_clip)).to(x.dtype)

        quantized = decoded(linears, stored, notes, inputs=inputs)
        return replace(quantized, bits=quantized.bits + turn.nbits(scaling=self.goal.scaling))

    def _groups(self, block: WholeBlock) -> tuple[Linears, ...]:
        return block.calibrated()  # SmoothQuant's scales read the largest inputs

    @property
    def _goal(self) -> Goal:
        bits = self.bits if self.goal.bits is not None else None
        return replace(self.goal, act=None if self.act == UNROUNDED else self.act, bits=bits)

    def _start(self, linears: Linears) -> Transform:
        scale_C = smoothing_scales(linears, largest_inputs(linears, self.name), ALPHA)
        return Transform.start(scale_C, linears.weights, self.bits, CLIP)

    def _round(self, linears: Linears, turned: Mapping[str, Tensor], turn: Transform) -> Stored:
        stored = {}
        for name, weight_RC in turned.items():
            share_R11 = turn.row_clips[name][:, None]
            lay = partial(fit_share, bits=self.bits, share=share_R11, scale_dtype="bf16")
            stored[name] = quantize_groups(weight_RC, self.bits, -1, lay=lay)
        return stored, ()


class _Rotated(FlatQuant):
    """What SpinQuant and OSTQuant share: rotations, and GPTQ behind them."""

    rounds_columns: ClassVar[bool] = True

    def _groups(self, block: WholeBlock) -> tuple[Linears, ...]:
        return block.groups

    def _start(self, linears: Linears) -> Transform:
        first = next(iter(linears.weights.values()))
        ones_C = torch.ones(first.shape[1], device=first.device)
        return Transform.start(ones_C, linears.weights, self.bits)

    def _round(self, linears: Linears, turned: Mapping[str, Tensor], turn: Transform) -> Stored:
        given = required_inputs(linears, self.name)
        inputs = Inputs(turn.of_gram(given.gram_CC), given.absmean_C, given.tokens)
        behind = replace(linears, weights=turned, inputs=inputs, fold_C=None)
        rounded = round_columns(behind, self.bits, damp=0.01)
        return rounded.stored, rounded.notes


@dataclass(frozen=True, kw_only=True)
class SpinQuant(_Rotated):
    """Learn a rotation of each input by Cayley steps, then round by GPTQ (SpinQuant)."""

    name: ClassVar[str] = "spinquant"
    version: ClassVar[int] = 3
    goal: ClassVar[Goal] = Goal(bits=None, orthogonal=True, scaling=False, clipping=False)


@dataclass(frozen=True, kw_only=True)
class OstQuant(_Rotated):
    """Learn a rotation and a scale of each input, then round by GPTQ (OSTQuant)."""

    name: ClassVar[str] = "ostquant"
    version: ClassVar[int] = 2
    goal: ClassVar[Goal] = Goal(orthogonal=True, scaling=True, clipping=False)


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

    def train(self, block: WholeBlock) -> Quantize:
        groups = block.calibrated()
        refuse_nonfinite(*groups)
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
        return torch.flatten(heads @ turn_KWW.mT.to(x.dtype), -3)

    def of_rows(self, weight_RC: Tensor, *, back: bool = False) -> Tensor:
        turn_KWW = torch.stack([*self.each]).to(weight_RC.dtype)
        before, part, behind = weight_RC.tensor_split([self.rows.start, self.rows.stop])
        part = (turn_KWW.mT if back else turn_KWW) @ part.unflatten(0, (-1, self.rows.width))
        return torch.cat([before, part.flatten(0, 1), behind])


class Basis(Learner):
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
        index_C, first = linears.fold_C, next(iter(self.weights.values()))
        count = 0 if index_C is None or linears.fold_is_norm else int(index_C.max()) + 1
        self._index_C = None if index_C is None else index_C.to(first.device)
        self._log_scale = first.new_zeros(count, dtype=torch.float32)
        self._shares: dict[str, Tensor] = {}
        self.free = [(self._log_scale, SCALES)] if count else []
        self.turns = () if self._read is None else self._read.each

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


class RoundedInputs(Learner):
    """How the inputs of a group with rounded weights are rounded."""

    def __init__(self, basis: Basis, rounded: Quantized, inputs: Inputs) -> None:
        self.basis, self._rounded = basis, rounded
        mean_square = float(inputs.gram_CC.diagonal().mean()) / inputs.tokens
        self._unit = max(mean_square, 1e-12) ** 0.5
        self.bias_C = torch.zeros_like(inputs.absmean_C, dtype=torch.float32)
        self.log_scale_C = torch.zeros_like(self.bias_C)
        self.clip = torch.logit(self.bias_C.new_full((), LARGEST_SHARE))
        self.free = [(self.bias_C, BIASES), (self.log_scale_C, SCALES), (self.clip, CLIPS)]
        self._weights = {name: basis.outwards(name, w) for name, w in rounded.weights.items()}

    def inputs(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        bias_C = (self._unit * self.bias_C).to(wide.dtype)
        moved = self.basis.inputs(wide) * self.log_scale_C.exp().to(wide.dtype) - bias_C
        share = torch.sigmoid(self.clip)
        grid = fit(moved, BITS, symmetric=False, dim=-1, shares=(share, share))
        return torch.add(snap_through(moved, grid), bias_C).to(x.dtype)

    def quantized(self) -> Quantized:
        return Quantized(self._weights, 0, inputs=self.inputs)

    def end(self) -> Quantized:
        given = self.basis.linears.weights
        weights = {name: self._weights[name].to(weight.dtype) for name, weight in given.items()}
        columns = 16 * self.bias_C.numel()
        bits = self._rounded.bits + (columns if self.basis.norm_C is not None else 2 * columns)
        return replace(self._rounded, weights=weights, bits=bits, inputs=self.inputs)
