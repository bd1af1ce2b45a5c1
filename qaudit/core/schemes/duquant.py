"""DuQuant: rotations of blocks that spread the largest columns, and a permutation between two.

Lin et al., "DuQuant: Distributing Outliers via Dual Transformation Makes Stronger Quantized LLMs"
(2406.01721). What the linears of a group read is divided by SmoothQuant's scales (alpha 0.6), then

- rotated in blocks of 128 columns. Each of up to 256 greedy steps takes the column of the largest
  magnitude and rotates it evenly over its block; the steps up to the smallest range are kept, and
  all blocks have the same ones;
- permuted: columns by falling magnitude are dealt to blocks in zigzag, so that blocks are alike;
- rotated in blocks once more, by steps of their own.

All of it is orthogonal but the scales, which the weights take. Then weights are rounded to nearest
by row, their range cut to 0.8, activations by token, cut to 0.9, both asymmetric. With `lwc=true`,
both ends of the range of each row are shares of their own, which begin at 0.8 and are learned for
150 steps on what the block returns (DuQuant + LWC), by Adam at 5e-2.

Simplified: rotations are chosen on a sample of the calibration text, not on its mean over windows;
a greedy step takes the column of the largest magnitude, as the paper says, where the published code
takes its row; a last block that 128 does not fill has rotations of its own. Every transformation is
in front of the linears; the authors fold some into what precedes. With `lwc=true`, transformations
are chosen on inputs of a block whose weights are not quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from qaudit.core.grid import Grid, fit, join_groups
from qaudit.core.linears import (
    INDEX_BITS,
    Linears,
    Quantize,
    Quantized,
    StoredWeight,
    WholeBlock,
    decoded,
    largest_inputs,
    refuse_nonfinite,
    sampled_inputs,
)
from qaudit.core.rotation import LARGEST_SHARE, Learner, descend, snap_through
from qaudit.core.scheme import UNROUNDED, Calibration, Scheme, added
from qaudit.core.schemes.w8a8 import smoothing_scales
from qaudit.support.lazy import Tensor, torch

STEPS = 256
LWC_STEPS, LWC_RATE = 150, 5e-2
SCALE_BITS = 16  # of rotations and scales, as a file would hold them


@dataclass(frozen=True, kw_only=True)
class DuQuant(Scheme):
    """Spread large columns by block rotations and a permutation, then round (DuQuant)."""

    name: ClassVar[str] = "duquant"
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM
    transforms_inputs: ClassVar[bool] = True

    bits: int
    act: int = 4
    block: int = 128
    alpha: float = 0.6
    weight_clip: float = 0.8
    clip: float = 0.9
    scale_dtype: str = "bf16"
    lwc: bool = added(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lwc:
            object.__setattr__(self, "calibration", Calibration.WHOLE_BLOCK)

    @property
    def learning_steps(self) -> int:
        return LWC_STEPS if self.lwc else 0

    @property
    def sampled_operations(self) -> int:
        """Two rotations of each block, by steps that multiply the sample with a square."""
        return 2 * STEPS * 2 * max(0, self.block)

    def quantize(self, linears: Linears) -> Quantized:
        return super().quantize(linears) if self.lwc else self._apply(linears, Clips(self, linears))

    def train(self, block: WholeBlock) -> Quantize:
        learners = {tuple(group.weights): Clips(self, group) for group in block.calibrated()}
        descend(block, list(learners.values()), LWC_STEPS)
        return lambda linears: self._apply(linears, learners[tuple(linears.weights)])

    def _apply(self, linears: Linears, clips: Clips) -> Quantized:
        refuse_nonfinite(linears)
        stored = {name: clips.stored(name) for name in linears.weights}
        quantized = decoded(linears, stored, inputs=clips.inputs(Grid.snap))
        return replace(quantized, bits=quantized.bits + clips.nbits)


class Clips(Learner):
    """A group behind its transformation, and shares of the ranges of its rows."""

    def __init__(self, scheme: DuQuant, linears: Linears) -> None:
        """Choose the transformation; begin at the shares that are not learned."""
        refuse_nonfinite(linears)
        self._scheme = scheme
        largest_C = largest_inputs(linears, scheme.name)
        self._scale_C = smoothing_scales(linears, largest_C, scheme.alpha)
        sample_TC = sampled_inputs(linears, scheme.name) / self._scale_C
        self._turn = DualTurn.of(sample_TC, scheme.block)
        self._turned: dict[str, Tensor] = {}
        self._ends: dict[str, Tensor] = {}  # of each row's range: below, above
        for name, weight_RC in linears.widened():
            turned_RC = self._turn(weight_RC * self._scale_C)
            self._turned[name] = turned_RC
            ends = turned_RC.new_full((2, len(turned_RC), 1), scheme.weight_clip)
            if scheme.lwc:
                ends = torch.logit(ends.clamp(max=LARGEST_SHARE))
            self._ends[name] = ends
        self.free = [(ends, LWC_RATE) for ends in self._ends.values()]
        # What a file holds of the transformation.
        self.nbits = self._turn.nbits + SCALE_BITS * len(self._scale_C)

    def quantized(self) -> Quantized:
        weights = {
            name: snap_through(turned_RC, self._grid(name))
            for name, turned_RC in self._turned.items()
        }
        return Quantized(weights, 0, inputs=self.inputs(lambda grid, x: snap_through(x, grid)))

    def inputs(self, snap: Callable[[Grid, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        act, shares = self._scheme.act, (self._scheme.clip, self._scheme.clip)

        def inputs(x: Tensor) -> Tensor:
            turned = self._turn(x.float() / self._scale_C)
            if act != UNROUNDED:
                turned = snap(fit(turned, act, symmetric=False, dim=-1, shares=shares), turned)
            return turned.to(x.dtype)

        return inputs

    def stored(self, name: str) -> StoredWeight:
        grid = self._grid(name).each(lambda values: values[:, None])
        parts = [(grid, grid.codes(self._turned[name][:, None]))]
        scale_dtype = self._scheme.scale_dtype
        return join_groups(parts, self._scheme.bits, -1, symmetric=False, scale_dtype=scale_dtype)

    def _grid(self, name: str) -> Grid:
        scheme, ends = self._scheme, self._ends[name]
        below_R1, above_R1 = ends.sigmoid() if scheme.lwc else ends
        lay = partial(fit, symmetric=False, dim=-1, scale_dtype=scheme.scale_dtype)
        return lay(self._turned[name], scheme.bits, shares=(below_R1, above_R1))


@dataclass(frozen=True, eq=False)
class BlockTurn:
    """One rotation for all full blocks of columns, and one for a last block that is smaller."""

    full_BB: Tensor
    last_LL: Tensor

    @classmethod
    def of(cls, sample_TC: Tensor, size: int) -> BlockTurn:
        full = sample_TC.shape[1] - sample_TC.shape[1] % size
        blocks = (sample_TC[:, :full].reshape(-1, size), sample_TC[:, full:])
        return cls(*map(greedy_rotation, blocks))

    def __call__(self, x: Tensor) -> Tensor:
        size, columns = len(self.full_BB), x.shape[-1]
        full = columns - columns % size
        turned = (x[..., :full].unflatten(-1, (-1, size)) @ self.full_BB.to(x)).flatten(-2)
        return torch.cat([turned, x[..., full:] @ self.last_LL.to(x)], -1)


@dataclass(frozen=True, eq=False)
class DualTurn:
    """Rotate blocks, permute columns between them, rotate blocks."""

    first: BlockTurn
    order_C: Tensor
    second: BlockTurn

    @classmethod
    def of(cls, sample_TC: Tensor, block: int) -> DualTurn:
        columns = sample_TC.shape[1]
        size = columns if block == -1 else min(block, columns)
        first = BlockTurn.of(sample_TC, size)
        turned_TC = first(sample_TC)
        order_C = zigzag(turned_TC.abs().amax(0), size)
        return cls(first, order_C, BlockTurn.of(turned_TC[:, order_C], size))

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[..., self.order_C])

    @property
    def nbits(self) -> int:
        rotations = (self.first, self.second)
        numbers = sum(rotation.full_BB.numel() + rotation.last_LL.numel() for rotation in rotations)
        return SCALE_BITS * numbers + INDEX_BITS * len(self.order_C)


def even_rotation(size: int) -> Tensor:
    """Return an orthogonal matrix whose first row is even, 1 / sqrt(size): Givens steps in turn."""
    turn = torch.eye(size, dtype=torch.float64)
    for i in range(size - 1):
        cos, sin = (1 / (i + 2)) ** 0.5, ((i + 1) / (i + 2)) ** 0.5
        upper, lower = turn[i].clone(), turn[i + 1].clone()
        turn[i], turn[i + 1] = cos * upper - sin * lower, sin * upper + cos * lower
    return _swapped(turn, size - 1)


def greedy_rotation(sample_NB: Tensor) -> Tensor:
    """Return the product of rotations of the largest column, up to the smallest range."""
    size = sample_NB.shape[1]
    product_BB = best_BB = torch.eye(size, dtype=sample_NB.dtype, device=sample_NB.device)
    if size < 2 or not len(sample_NB):
        return best_BB
    even_BB = even_rotation(size).to(sample_NB)
    smallest = _range(sample_NB)
    for _ in range(STEPS):  # nothing here is told the host, for which a GPU would wait
        turn_BB = _swapped(even_BB, sample_NB.abs().amax(0).argmax())
        sample_NB, product_BB = sample_NB @ turn_BB, product_BB @ turn_BB
        spread = _range(sample_NB)
        best_BB = torch.where(spread < smallest, product_BB, best_BB)
        smallest = torch.where(spread < smallest, spread, smallest)
    return best_BB


def zigzag(size_C: Tensor, block: int) -> Tensor:
    """Deal columns by falling size to blocks, forth and back; return their places in order."""
    columns = len(size_C)
    room = [min(block, columns - start) for start in range(0, columns, block)]
    dealt: list[list[int]] = [[] for _ in room]
    walk = [*range(len(room)), *reversed(range(len(room)))]
    ordered = iter(torch.argsort(size_C, descending=True, stable=True).tolist())
    while sum(map(len, dealt)) < columns:
        for channel in walk:
            if len(dealt[channel]) < room[channel]:
                dealt[channel].append(next(ordered))
    return torch.tensor([c for block in dealt for c in block], device=size_C.device)


def _swapped(matrix: Tensor, j: int | Tensor) -> Tensor:
    place = torch.arange(len(matrix), device=matrix.device)
    order = torch.where(place == j, 0, torch.where(place == 0, j, place))
    return matrix[order][:, order]


def _range(x: Tensor) -> Tensor:
    return x.max() - x.min()
