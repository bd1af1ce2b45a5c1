"""AWQ: scale up the columns that matter, clip what does not, then round to nearest.

Lin et al., "AWQ: Activation-aware Weight Quantization" (2306.00978), with the search of
AutoAWQ, whose defaults today's files carry:

    scale = x_mean^ratio / (w_mean^(1 - ratio) + 1e-4), over the root of its largest times its
    smallest, for 20 ratios from 0 to 0.95 (`ratios=llm-compressor`: no scaling at all, and 19
    ratios from 0 to 1); x_mean is the mean magnitude of a column of the
    inputs, w_mean that of the weights, each divided by the maximum of its group (AutoAWQ's
    `duo_scaling`, on by default); then, per group of each row, the best of 10 clippings of
    the largest magnitude by a factor of 1 down to 0.55.

**Folding.** A scaled weight Q(W diag(s)) reads inputs divided by s. Dividing what comes before
by s is exact only where something linear precedes column by column (`Linears.fold_C`); in
real arithmetic the model then computes Q(W diag(s)) diag(1/s) on the inputs it always had,
which is what is returned here, so that the model itself need never be touched. Columns with
one index in `fold_C` (query heads that share a kv head) get one scale, found from their
pooled means. Where nothing can take the scales, weights are only clipped, and a note says so,
unless `unfolded` asks for scales that a kernel would apply itself, which are counted.

**Losses are exact, from the Gram matrix** H of the full-precision inputs: the squared output
error of a linear is sum(E H * E) for a weight error E, over all calibration tokens, and that
of one group of a row needs the group's diagonal block of H alone. AutoAWQ and llm-compressor run
modules instead: with `modules=true`, too, the outputs of the whole attention decide for q/k/v and
those of the whole MLP for gate/up, and weights are clipped on every n-th token, 512 to 1,023 of
them, as in AutoAWQ. Both scale `o_proj` only where each query head has a value head of its own,
which `shared_fold=false` does; by default query heads that share a value head share their scales.

As in AutoAWQ, queries and keys are scaled but not clipped (their product decides, not they).
Grids are those of `qaudit/core/grid.py`: always including 0, as in llm-compressor; AutoAWQ
leaves 0 out of the range of a group whose weights have one sign.

Given up: the rounding of what precedes, divided by s, to its own dtype. With `exact_fold` there is
none: scales are rounded to powers of two before they are compared, so that dividing a norm's
weight, or the scales of a quantized linear, changes exponents alone.

Shapes: R rows, C columns, G groups, K columns of one group, I distinct scales, S scales tried,
B bounds tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from qaudit.core.grid import (
    CAST_LAST,
    Grid,
    as_stored,
    fit,
    group_notes,
    join_groups,
    powers_of_two,
    quantize_groups,
    split_groups,
)
from qaudit.core.linears import (
    IntegerCodes,
    Linears,
    Quantized,
    decoded,
    quadratic_forms,
    refuse_nonfinite,
    required_inputs,
    tf32_products,
)
from qaudit.core.scheme import Calibration, Scheme, added, one_of
from qaudit.support.lazy import Tensor, torch

RATIOS: Mapping[str, tuple[float | None, ...]] = {  # None: no scaling
    "autoawq": tuple(step / 20 for step in range(20)),
    "llm-compressor": (None, *(step / 18 for step in range(19))),
}
CLIPPINGS = 10
CLIP_STEPS = 20
CLIP_TOKENS = 512  # of AutoAWQ, up to twice as many
GPU_CHUNK = 2**27  # weights that are tried at a time on a GPU


_BY_MODULES = {"exact_fold": False, "shared_fold": False, "modules": True}


@dataclass(frozen=True, kw_only=True)
class Awq(Scheme):
    """Scale columns by their inputs and clip groups before rounding (AWQ)."""

    name: ClassVar[str] = "awq"
    version: ClassVar[int] = 3
    calibration: ClassVar[Calibration] = Calibration.FULL_PRECISION

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "llm-compressor": {
            "zero_point": True,
            "clip": False,
            **_BY_MODULES,
            "ratios": "llm-compressor",
            "all_tokens": True,
        },
        "autoawq": {"zero_point": True, "clip": True, **_BY_MODULES, "ratios": "autoawq"},
    }
    bits: int
    group: int = 128
    zero_point: bool = True
    clip: bool = True
    unfolded: bool = False
    exact_fold: bool = False
    shared_fold: bool = added(True)
    modules: bool = added(False)
    ratios: str = added("autoawq", one_of("ratios", RATIOS, "`{}` names no search over ratios"))
    all_tokens: bool = added(False)
    scale_dtype: str = "bf16"

    def tried_weights(self, count: int) -> int:
        return min(GPU_CHUNK, len(RATIOS[self.ratios]) * count)

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        fold_C = self._fold(linears)
        scale_C = self.search_scales(linears)
        # The moments by which weights are clipped: of all tokens, or of AutoAWQ's.
        inputs = required_inputs(linears, self.name)
        gram_CC = inputs.gram_CC
        if linears.tokens is not None:
            step, first, gram_CC = max(1, inputs.tokens // CLIP_TOKENS), 0, inputs.gram_CC * 0
            for x_TC in linears.tokens():
                taken_TC = x_TC[first::step].to(gram_CC)
                gram_CC.addmm_(taken_TC.T, taken_TC)
                first = (first - len(x_TC)) % step
        stored = {}
        for name, weight_RC in linears.widened():
            scaled_RC = weight_RC if scale_C is None else weight_RC * scale_C
            last = name.rpartition(".")[2].lower()
            is_query_or_key = re.match("[qk]_", last) or re.search("query|key|qkv", last)
            if self.clip and not is_query_or_key:
                scaled_CC = gram_CC.to(scaled_RC)
                if scale_C is not None:
                    scaled_CC = scaled_CC / scale_C / scale_C[:, None]
                stored[name] = self._clip_and_quantize(scaled_RC, scaled_CC)
            else:
                stored[name] = quantize_groups(scaled_RC, self.bits, self.group, **self._grid)
        notes = list(group_notes(linears.columns, self.group))
        if scale_C is None:
            reason = "nothing before these linears can take scales"
            if linears.fold_C is not None:
                reason = "columns share a row of what precedes, and shared_fold=false"
            notes.append(f"{reason}: {'clipped' if self.clip else 'rounded'} only")
        elif fold_C is None:
            notes.append("scales applied unfolded, counted too")
        if scale_C is not None and self.modules and len(stored) > 1 and linears.around is None:
            notes.append("scales by the linears' own outputs: no module around them runs alone")
        quantized = decoded(linears, stored, tuple(notes), column_scale_C=scale_C)
        if scale_C is not None and fold_C is None:
            column_bits = 8 * as_stored(scale_C, self.scale_dtype).nbytes
            quantized = replace(quantized, bits=quantized.bits + column_bits)
        return quantized

    def search_scales(self, linears: Linears) -> Tensor | None:
        """Return the best scale of every column, or nothing where no scale may be applied."""
        inputs = required_inputs(linears, self.name)
        fold_C = self._fold(linears)
        if fold_C is None and not self.unfolded:
            return None
        weight_RC = torch.cat([one_RC for _, one_RC in linears.widened()])
        tie_C = torch.arange(weight_RC.shape[1]) if fold_C is None else fold_C.cpu()
        tie_C = torch.unique(tie_C, return_inverse=True)[1]
        # On the host: a GPU adds in any order, and the last bits could choose another ratio.
        input_mean_I = _pooled_mean(inputs.absmean_C.to(weight_RC).cpu(), tie_C)
        relative = []  # the mean over rows of a column's |weight| over the largest of its group
        for part_RGK in split_groups(weight_RC, self.group):
            magnitude_RGK = part_RGK.abs()
            magnitude_RGK = magnitude_RGK / (magnitude_RGK.amax(-1, keepdim=True) + 1e-6)
            relative.append(magnitude_RGK.mean(0).flatten())
        weight_mean_I = _pooled_mean(torch.cat(relative).cpu(), tie_C)
        ratios = RATIOS[self.ratios]
        scales = [_scales(input_mean_I, weight_mean_I, ratio)[tie_C] for ratio in ratios]
        if self.exact_fold:
            scales = [powers_of_two(scale_C) for scale_C in scales]
        elif fold_C is None:
            scales = [as_stored(one_C, self.scale_dtype).to(weight_RC.dtype) for one_C in scales]
        scale_SC = torch.stack(scales).to(weight_RC.device)
        if linears.around is not None:
            losses = linears.around([partial(self._rounded, linears, one_C) for one_C in scale_SC])
        else:
            losses = self._own_losses(weight_RC, inputs.gram_CC, scale_SC)
        finite = [k for k, loss in enumerate(losses) if loss < float("inf")]
        return scale_SC[min(finite, key=losses.__getitem__)] if finite else None

    def _own_losses(self, weight_RC: Tensor, gram_CC: Tensor, scale_SC: Tensor) -> list[float]:
        """Return for each scale the squared error of what the linears themselves return."""
        # Every pair of columns once: the quadratic form of this triangle is that of the matrix.
        gram_CC = gram_CC.to(weight_RC)
        pairs_CC = torch.triu(gram_CC) + torch.triu(gram_CC, 1)
        loss_S = weight_RC.new_zeros(len(scale_SC))
        scales, rows = _at_once(weight_RC, len(scale_SC))
        with tf32_products(weight_RC):
            for some_SC, into_S in zip(scale_SC.split(scales), loss_S.split(scales), strict=True):
                for part_RC in weight_RC.split(rows):
                    scaled_SRC = part_RC * some_SC[:, None]
                    error_SRC = self._round(scaled_SRC.flatten(0, 1)).view_as(scaled_SRC)
                    error_SRC.div_(some_SC[:, None]).sub_(part_RC)
                    into_S += quadratic_forms(error_SRC, pairs_CC)
        return list(map(float, loss_S.tolist()))

    def _rounded(self, linears: Linears, scale_C: Tensor) -> dict[str, Tensor]:
        return {n: self._round(w * scale_C).div_(scale_C) for n, w in linears.widened()}

    def _fold(self, linears: Linears) -> Tensor | None:
        """Return which columns share a scale that folds, or nothing where none may."""
        fold_C = linears.fold_C
        if fold_C is None or self.shared_fold or len(fold_C.unique()) == len(fold_C):
            return fold_C
        return None

    @property
    def _grid(self) -> dict[str, Any]:
        scale_dtype = CAST_LAST if self.scale_dtype == "bf16" else self.scale_dtype
        return {"symmetric": not self.zero_point, "scale_dtype": scale_dtype}

    def _round(self, weight_RC: Tensor) -> Tensor:
        parts = [
            fit(part_RGK, self.bits, dim=-1, **self._grid).snap(part_RGK).flatten(1)
            for part_RGK in split_groups(weight_RC, self.group)
        ]
        return torch.cat(parts, dim=1)

    def _clip_and_quantize(self, weight_RC: Tensor, gram_CC: Tensor) -> IntegerCodes:
        parts, start = [], 0
        for part_RGK in split_groups(weight_RC, self.group):
            groups, size = part_RGK.shape[1:]
            stop = start + groups * size
            square_GKGK = gram_CC[start:stop, start:stop].view(groups, size, groups, size)
            blocks_GKK = square_GKGK.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            weight_GRK = part_RGK.transpose(0, 1)
            clipped_GRK, grid = self._clip(weight_GRK, self._best_bound(weight_GRK, blocks_GKK))
            codes_RGK = grid.codes(clipped_GRK).transpose(0, 1)
            parts.append((grid.each(lambda values_GR1: values_GR1.transpose(0, 1)), codes_RGK))
            start = stop
        return join_groups(parts, self.bits, self.group, **self._grid)

    def _clip(self, weight_GRK: Tensor, bound_GR1: Tensor) -> tuple[Tensor, Grid]:
        clipped_GRK = torch.clamp(weight_GRK, -bound_GR1, bound_GR1)
        return clipped_GRK, fit(clipped_GRK, self.bits, dim=-1, **self._grid)

    def _best_bound(self, weight_GRK: Tensor, blocks_GKK: Tensor) -> Tensor:
        """Return the largest magnitude of each group when clipped best; the wider wins a tie."""
        largest_GR1 = weight_GRK.abs().amax(-1, keepdim=True)
        bound_GBR1 = torch.stack([largest_GR1 * (1 - k / CLIP_STEPS) for k in range(CLIPPINGS)], 1)
        bounds, rows = _at_once(weight_GRK.transpose(0, 1).flatten(1), CLIPPINGS)
        best = []
        for part_GRK, tried_GBR1 in zip(
            weight_GRK.split(rows, 1), bound_GBR1.split(rows, 2), strict=True
        ):
            losses = []
            for some_GBR1 in tried_GBR1.split(bounds, 1):
                clipped_GBRK, grid = self._clip(part_GRK[:, None], some_GBR1)
                error_GNK = (grid.snap(clipped_GBRK) - part_GRK[:, None]).flatten(1, 2)
                loss_GN1 = (error_GNK @ blocks_GKK).mul_(error_GNK).sum(-1, keepdim=True)
                losses.append(loss_GN1.view_as(some_GBR1))
            place_G1R1 = torch.cat(losses, 1).argmin(1, keepdim=True)
            best.append(tried_GBR1.gather(1, place_G1R1).squeeze(1))
        return torch.cat(best, 1)


def _at_once(weight_RC: Tensor, count: int) -> tuple[int, int]:
    """Return how many candidates are tried at a time, and on how many rows.

    A processor tries each by itself; on a GPU starting kernels would take longer than they do.
    """
    rows, columns = weight_RC.shape
    if weight_RC.device.type == "cpu":
        return 1, rows
    return count, max(1, GPU_CHUNK // (count * columns))


def _scales(input_mean: Tensor, weight_mean: Tensor, ratio: float | None) -> Tensor:
    if ratio is None:
        return torch.ones_like(input_mean)
    scale = (input_mean.pow(ratio) / (weight_mean.pow(1 - ratio) + 1e-4)).clamp(min=1e-4)
    scale = scale / (scale.max() * scale.min()).sqrt()
    return torch.where(torch.isfinite(scale), scale, 1.0)


def _pooled_mean(value_C: Tensor, tie_C: Tensor) -> Tensor:
    count_I = torch.bincount(tie_C)
    summed_I = torch.zeros_like(count_I, dtype=value_C.dtype).index_add_(0, tie_C, value_C)
    return summed_I / count_I
