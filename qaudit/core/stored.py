"""What a file holds of a quantized linear: codes and what turns them back into weights.

A scheme returns a `StoredWeight` beside each dense weight. Dense weights are decoded from it, so
that what is measured is what can be written, and storage is counted from it. A format that needs
other parts (8-bit floats, blocks of llama.cpp) is a further subclass beside the scheme that makes
it; an exporter tells formats apart by the class.

Shapes: R rows, C columns, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from qaudit.support.lazy import Tensor, torch

Codes = Literal["integers", "float8", "nv-float4", "mx-float4", "bitsandbytes", "gguf"]


@dataclass(frozen=True)
class CodeLayout:
    """What files hold of a scheme's weights, and how a runtime then computes with them.

    A scheme says it where its stored codes alone do not (`Scheme.layout`); formats of files read
    it, and so know no scheme.
    """

    codes: Codes
    rounds_inputs: bool = False  # the runtime rounds what linears read, as the scheme did
    squares: bool = False  # a scale for squares of weights, in place of one for each row
    kind: str = ""  # what the library of the codes calls their type


INDEX_BITS = 32  # a column's group, as GPTQ files store it under `desc_act`


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """Base of every stored form of one linear's weight."""

    def decode(self) -> Tensor:
        """Return the dense (R, C) weight, in the precision in which it is computed."""
        raise NotImplementedError

    @property
    def nbits(self) -> int:
        """Count the bits of everything that differs from linear to linear."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class IntegerCodes(StoredWeight):
    """Codes on one uniform grid for each group of each row: weight = (code - zero) * scale.

    Scales are in the dtype in which they are stored. With bfloat16 scales every weight is exact
    in float32: a difference of codes has 8 bits and a scale has 8.
    """

    codes_RC: Tensor  # uint8, 0 to 2^bits - 1
    scales_RG: Tensor
    zeros_RG: Tensor | None  # uint8; None: symmetric, 2^(bits - 1) everywhere
    bits: int
    group: int  # columns of a full group; the last group can be smaller
    group_of_C: Tensor | None = None  # where a column's group is not its number over `group`

    def decode(self) -> Tensor:
        wide = torch.promote_types(self.scales_RG.dtype, torch.float32)
        weight_RC, scales_RG = self.codes_RC.to(wide), self.scales_RG.to(wide)
        zeros_RG = torch.full_like(scales_RG, 2 ** (self.bits - 1))
        if self.zeros_RG is not None:
            zeros_RG = self.zeros_RG.to(wide)
        if self.group_of_C is not None:
            zeros_RC = zeros_RG.index_select(1, self.group_of_C)
            return weight_RC.sub_(zeros_RC).mul_(scales_RG.index_select(1, self.group_of_C))
        columns = weight_RC.shape[1]
        full = columns - columns % self.group
        for start, stop in ((0, full), (full, columns)):
            if start < stop:  # full groups at once, then the smaller one at the end
                part_RGK = weight_RC[:, start:stop].unflatten(
                    1, (-1, min(self.group, stop - start))
                )
                groups = slice(start // self.group, -(-stop // self.group))
                part_RGK.sub_(zeros_RG[:, groups, None]).mul_(scales_RG[:, groups, None])
        return weight_RC

    def split_rows(self, counts: Sequence[int]) -> list[IntegerCodes]:
        """Return the codes of matrices whose rows follow one another in this one."""
        parts: list[IntegerCodes] = []
        for count, end in zip(counts, accumulate(counts), strict=True):
            rows = slice(end - count, end)
            part = replace(
                self,
                codes_RC=self.codes_RC[rows].contiguous(),
                scales_RG=self.scales_RG[rows].contiguous(),
                zeros_RG=None if self.zeros_RG is None else self.zeros_RG[rows].contiguous(),
            )
            parts.append(part)
        return parts

    @property
    def nbits(self) -> int:
        per_group = 8 * self.scales_RG.element_size() + (0 if self.zeros_RG is None else self.bits)
        index = 0 if self.group_of_C is None else INDEX_BITS * len(self.group_of_C)
        return self.codes_RC.numel() * self.bits + self.scales_RG.numel() * per_group + index
