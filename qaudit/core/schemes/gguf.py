"""GGUF's formats in blocks of 32: Q8_0 and Q4_0, as llama.cpp writes them, without calibration.

    Q8_0     code = round(w / d), ties away from zero, d = largest magnitude / 127
    Q4_0     code = trunc(w / d + 8.5), d = -(the weight of largest magnitude) / 8

Codes are chosen with d in float32; a file holds d in float16, and weights come back from that.
Rows that 32 does not divide cannot be stored, and are refused. Blocks are packed as in a file.

Given up: importance matrices, which llama.cpp uses for Q4_0 where one is given; the K-quants.

Shapes: R rows, C columns, N blocks, K columns of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qaudit.core.scheme import Linears, Quantized, Scheme, decoded, refuse_nonfinite
from qaudit.core.stored import StoredWeight
from qaudit.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
SCALE_NBYTES = 2


@dataclass(frozen=True, eq=False)
class GgufBlocks(StoredWeight):
    """Packed blocks of a row after another: a float16 scale, then codes."""

    packed: Tensor  # uint8, (R, bytes)
    kind: str  # "Q8_0" or "Q4_0"

    def decode(self) -> Tensor:
        import torch

        rows = len(self.packed)
        blocks_NB = self.packed.reshape(-1, _block_nbytes(self.kind))
        scale_N1 = blocks_NB[:, :SCALE_NBYTES].contiguous().view(torch.float16).float()
        codes_NB = blocks_NB[:, SCALE_NBYTES:].contiguous()
        if self.kind == "Q8_0":
            codes_NK = codes_NB.view(torch.int8).float()
        else:
            codes_NK = torch.cat([codes_NB & 15, codes_NB >> 4], 1).float() - 8
        return (codes_NK * scale_N1).reshape(rows, -1)

    @property
    def nbits(self) -> int:
        return 8 * self.packed.numel()


@dataclass(frozen=True, kw_only=True)
class GgufQ8(Scheme):
    """Round blocks of 32 weights to 8 bits as llama.cpp does (GGUF Q8_0)."""

    name: ClassVar[str] = "gguf-q8_0"
    code_bits: ClassVar[int | None] = 8

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        for name, weight_RC in linears.weights.items():
            if weight_RC.shape[1] % BLOCK:
                raise SourceError(
                    f"`{name}` has rows of {weight_RC.shape[1]} columns, and `{self.name}` stores "
                    f"blocks of {BLOCK}",
                    hint=f"leave {self.name} out; `rtn` takes any number of columns",
                )
        kind = self.name.removeprefix("gguf-").upper()
        pack = {"Q8_0": _q8_0, "Q4_0": _q4_0}[kind]
        stored = {}
        for name, weight_RC in linears.weights.items():
            blocks_NK = weight_RC.detach().float().reshape(-1, BLOCK)
            stored[name] = GgufBlocks(pack(blocks_NK).reshape(len(weight_RC), -1), kind)
        return decoded(linears, stored)


@dataclass(frozen=True, kw_only=True)
class GgufQ4(GgufQ8):
    """Round blocks of 32 weights to 4 bits as llama.cpp does (GGUF Q4_0)."""

    name: ClassVar[str] = "gguf-q4_0"
    code_bits: ClassVar[int | None] = 4


def _q8_0(blocks_NK: Tensor) -> Tensor:
    import torch

    scale_N1 = blocks_NK.abs().amax(1, keepdim=True) / 127
    steps_NK = (blocks_NK * _inverse(scale_N1)).abs()
    floor_NK = steps_NK.floor()
    magnitude_NK = floor_NK + (2 * (steps_NK - floor_NK)).floor()
    codes_NK = torch.copysign(magnitude_NK, blocks_NK).to(torch.int8)
    return torch.cat([_half(scale_N1), codes_NK.view(torch.uint8)], 1)


def _q4_0(blocks_NK: Tensor) -> Tensor:
    import torch

    largest_N1 = blocks_NK.gather(1, blocks_NK.abs().argmax(1, keepdim=True))
    scale_N1 = largest_N1 / -8
    codes_NK = (blocks_NK * _inverse(scale_N1) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    low_NB, high_NB = codes_NK.chunk(2, 1)
    return torch.cat([_half(scale_N1), low_NB | (high_NB << 4)], 1)


def _inverse(scale: Tensor) -> Tensor:
    import torch

    return torch.where(scale == 0, 0.0, 1 / scale)


def _half(scale_N1: Tensor) -> Tensor:
    import torch

    return scale_N1.to(torch.float16).view(torch.uint8)


def _block_nbytes(kind: str) -> int:
    return SCALE_NBYTES + (BLOCK if kind == "Q8_0" else BLOCK // 2)
