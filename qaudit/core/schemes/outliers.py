"""Columns in two precisions: those with outliers keep more bits than the others.

GPTQ walks the columns and moves each error on to those behind it. With the columns that keep more
bits at the end, they take up what the others lost. Eliminating them first comes to the same: with
K the kept columns and I the others, the others are rounded for the Gram matrix

    S = H_II - H_IK H_KK^-1 H_KI

which is what is left of an error once the kept columns have made up for it, and then

    W_K + (W_I - Q_I) H_IK H_KK^-1

is what they become. That is the published loop in exact arithmetic. H is damped before it is split,
so that the others are damped by the same number as the kept columns.

**Atom**: groups of four bits, and the 128 heaviest columns in eight.

Zhao et al., "Atom: Low-bit Quantization for Efficient and Accurate LLM Serving" (2310.19102).
Columns are ordered by the mean square of their inputs. The last 128 are rounded to 8 bits, the
others to 4 in groups of 128: weights by GPTQ, whose errors go on to the last columns, the range of
a group cut to 0.85 (`weight_clip`); activations by token and group, symmetric, the largest
magnitude of a group cut to 0.9 of itself (`clip`). Inputs of all linears of a block are taken
before the first is quantized. Its cache of 4 bits is `atom-4bit:kv=int4`.

Simplified: at most one column in 16 has 8 bits, and a note says so; within a block, statistics of
GPTQ are of inputs that are not rounded; columns are ordered by inputs of the scheme's own stream;
each row has scales of its own, where the published settings let two rows share them.

**QUIK**: most columns and activations in four bits, the columns with outliers as they are.

Ashkboos et al., "QUIK: Towards End-to-End 4-Bit Inference on Generative Large Language Models"
(2310.09259). The 256 columns whose inputs reach the largest magnitudes stay in 16 bits, weights and
activations. The others are rounded by GPTQ, symmetric, one scale a row, the best of 80 (`--w_clip`,
`qaudit/core/grid.py`), whose errors the kept columns take up; their activations by token,
asymmetric. The last linears of a block (down) are in 8 bits, weights and activations. Linears whose
inputs never exceed `threshold` keep no column; down, in 8 bits, where they never exceed twice that
(`--fp_threshold`, 0 by default there too). `search=false` leaves out the search for scales.

Simplified: at most one column in 16 is kept, and a note says so; down keeps as many columns as the
others (`--fp_relative` is not there); magnitudes are those of the scheme's own stream.

Shapes: R rows, C columns, K kept columns, I others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from qaudit.core.floats import by_group, round_tokens
from qaudit.core.grid import Grid, fit, fit_range, fit_share, quantize_groups
from qaudit.core.linears import (
    INDEX_BITS,
    Inputs,
    Linears,
    Quantized,
    StoredWeight,
    decoded,
    largest_inputs,
    refuse_nonfinite,
    required_inputs,
)
from qaudit.core.scheme import BITS, Calibration, Scheme, limited
from qaudit.core.schemes.gptq import Gptq
from qaudit.core.schemes.quarot import round_columns
from qaudit.support.lazy import Tensor, torch

LARGEST_SHARE = 16  # at most one column in so many is kept, as 256 of 4,096 are
DAMPED = 1e-12  # what GPTQ adds to a diagonal that is damped already


@dataclass(frozen=True, eq=False)
class PlainColumns(StoredWeight):
    """Columns as they are, in 16 bits."""

    weight_RC: Tensor  # bfloat16

    def decode(self) -> Tensor:
        return self.weight_RC.float()

    @property
    def nbits(self) -> int:
        return 16 * self.weight_RC.numel()


@dataclass(frozen=True, eq=False)
class MixedCodes(StoredWeight):
    """Most columns in few bits, the others in more, and which column is where."""

    rest: StoredWeight
    kept: StoredWeight | None  # None: no column
    order_C: Tensor  # the columns of `rest`, then those of `kept`, by their place in the weight
    indices: int  # of columns, which a file has to hold

    def decode(self) -> Tensor:
        parts = [part.decode() for part in (self.rest, self.kept) if part is not None]
        return torch.cat(parts, 1)[:, torch.argsort(self.order_C)]

    @property
    def nbits(self) -> int:
        kept = 0 if self.kept is None else self.kept.nbits
        return self.rest.nbits + kept + INDEX_BITS * self.indices


@dataclass(frozen=True, eq=False)
class Split:
    """Which columns are rounded to few bits, in which order, and which are kept."""

    rest_I: Tensor
    kept_K: Tensor
    notes: tuple[str, ...] = ()

    @classmethod
    def by(cls, size_C: Tensor, count: int) -> Split:
        """Keep the columns of the largest sizes; the others are in rising order."""
        order_C = torch.argsort(size_C, stable=True)
        most = len(order_C) // LARGEST_SHARE
        note = f"{most} of {len(order_C)} columns keep more bits, not {count}"
        rest = len(order_C) - min(count, most)
        return cls(order_C[:rest], order_C[rest:], (note,) if count > most else ())

    def around(
        self, x: Tensor, rest: Callable[[Tensor], Tensor], kept: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Change the last dimension of x in both parts, each in its own way."""
        out = x.clone()
        out[..., self.rest_I] = rest(x[..., self.rest_I])
        if len(self.kept_K):
            out[..., self.kept_K] = kept(x[..., self.kept_K])
        return out


def round_mixed(
    linears: Linears,
    split: Split,
    rounding: Callable[[Linears], Quantized],
    keep: Callable[[Tensor], StoredWeight],
    *,
    damp: float,
    indices: int,
) -> tuple[Mapping[str, StoredWeight], tuple[str, ...]]:
    """Round most columns, and keep the others.

    `rounding` sees a Gram matrix that is damped already, and adds no more than `DAMPED`.
    """
    inputs = required_inputs(linears, "outliers")
    wide = dict(linears.widened())
    first = next(iter(wide.values()))
    gram_CC = inputs.gram_CC.to(first, copy=True)
    alive_C = gram_CC.diagonal() > 0  # GPTQ zeroes the weights of the others
    damping = damp * gram_CC.diagonal().sum() / alive_C.sum().clamp(min=1)
    gram_CC.diagonal().add_(damping * alive_C)
    rest_I, kept_K = split.rest_I.to(first.device), split.kept_K.to(first.device)
    gram_II = gram_CC[rest_I][:, rest_I]
    solved_KI = gram_CC[kept_K][:, rest_I]
    if len(kept_K):
        gram_KK = gram_CC[kept_K][:, kept_K]
        gram_KK.diagonal().clamp_(min=torch.finfo(first.dtype).tiny)
        solved_KI = torch.linalg.solve(gram_KK, solved_KI)
        gram_II = gram_II - gram_CC[rest_I][:, kept_K] @ solved_KI
        gram_II = (gram_II + gram_II.T) / 2
    weights = {name: weight_RC[:, rest_I] for name, weight_RC in wide.items()}
    behind = Inputs(gram_II, inputs.absmean_C[rest_I], inputs.tokens)
    rounded = rounding(replace(linears, weights=weights, inputs=behind, fold_C=None))
    order_C = torch.cat([rest_I, kept_K])
    stored = {}
    for name, weight_RC in wide.items():
        kept = None
        if len(kept_K):
            error_RI = weights[name] - rounded.stored[name].decode().to(first)
            kept = keep(weight_RC[:, kept_K] + error_RI @ solved_KI.T)
        stored[name] = MixedCodes(rounded.stored[name], kept, order_C, indices)
    return stored, (*split.notes, *rounded.notes)


KEPT_BITS = 8


@dataclass(frozen=True, kw_only=True)
class Atom(Scheme):
    """Round the heaviest columns to 8 bits and groups of the others to few (Atom)."""

    name: ClassVar[str] = "atom"
    version: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = Calibration.OWN_BLOCKS
    rounds_columns: ClassVar[bool] = True

    bits: int
    act: int = limited(4, BITS)
    group: int = 128
    keep: int = 128
    clip: float = 0.9
    weight_clip: float = 0.85
    damp: float = 0.01

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        diagonal_C = required_inputs(linears, self.name).gram_CC.diagonal()
        split = Split.by(diagonal_C, self.keep)
        rounding = Gptq(bits=self.bits, group=self.group, damp=DAMPED, act_group_aware=False)

        def lay(weight_KR: Tensor) -> Grid:
            ends = weight_KR.aminmax(dim=0, keepdim=True)
            smallest, largest = (self.weight_clip * end for end in ends)
            return fit_range(smallest, largest, self.bits, symmetric=True, scale_dtype="bf16")

        def in_eight(weight_RK: Tensor) -> StoredWeight:
            shares = partial(fit_share, bits=KEPT_BITS, scale_dtype="bf16")
            return quantize_groups(weight_RK, KEPT_BITS, -1, lay=shares)

        rounded = partial(rounding.rounded, lay=lay)
        indices = len(diagonal_C)
        stored, notes = round_mixed(
            linears, split, rounded, in_eight, damp=self.damp, indices=indices
        )
        group = len(split.rest_I) if self.group == -1 else self.group

        def inputs(x: Tensor) -> Tensor:
            rest = partial(round_tokens, bits=self.act, clip=self.clip)
            in_groups = partial(by_group, size=group, change=rest)
            kept = partial(round_tokens, bits=KEPT_BITS)
            return split.around(x.float(), in_groups, kept).to(x.dtype)

        return decoded(linears, stored, notes, inputs=inputs)


@dataclass(frozen=True, kw_only=True)
class Quik(Scheme):
    """Keep columns with outliers in 16 bits, round the others and activations (QUIK)."""

    name: ClassVar[str] = "quik"
    version: ClassVar[int] = 2
    calibration: ClassVar[Calibration] = Calibration.OWN_STREAM
    rounds_columns: ClassVar[bool] = True

    bits: int
    act: int = limited(4, BITS)
    down: int = limited(8, BITS)
    keep: int = 256
    threshold: float = limited(
        0.0,
        (
            lambda size: size >= 0,
            "inputs never exceed a threshold of {}, or always do",
            "use threshold=0 to keep columns of every linear",
        ),
    )
    damp: float = 0.01
    search: bool = True

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        bits, act = (self.down, self.down) if linears.is_last else (self.bits, self.act)
        largest_C = largest_inputs(linears, self.name)
        threshold = self.threshold * (2 if bits > self.bits else 1)
        split = Split.by(largest_C, self.keep if float(largest_C.max()) > threshold else 0)
        rounding = partial(round_columns, bits=bits, damp=DAMPED, search=self.search)
        indices = len(split.kept_K)

        def plain(weight_RK: Tensor) -> StoredWeight:
            return PlainColumns(weight_RK.to(torch.bfloat16))

        stored, notes = round_mixed(
            linears, split, rounding, plain, damp=self.damp, indices=indices
        )

        def round_rest(x: Tensor) -> Tensor:
            return fit(x, act, symmetric=False, dim=-1).snap(x)

        def inputs(x: Tensor) -> Tensor:
            return split.around(x.float(), round_rest, lambda kept: kept).to(x.dtype)

        return decoded(linears, stored, notes, inputs=inputs)
