"""What a GGUF file holds of a matrix: blocks of codes under scales, and their weights.

| type | columns | of a block, in order | weight |
|---|---|---|---|
| Q8_0 | 32 | d, 32 codes | d q |
| Q4_0 | 32 | d, codes k and k + 16 in one byte | d (q - 8) |
| Q5_0 | 32 | d, fifth bits, four bits as Q4_0 | d (q - 16) |
| Q5_1 | 32 | d, m, fifth bits, four bits | d q + m |
| Q3_K | 256 | third bits, two bits, scales s of 6 bits for 16 columns, d | d (s - 32) (q - 4) |
| Q4_K | 256 | d, e, scales s and t of 6 bits for 32 columns, four bits | d s q - e t |
| Q5_K | 256 | d, e, scales, fifth bits, four bits | d s q - e t |
| Q6_K | 256 | four bits, two bits, scales s of 8 bits for 16 columns, d | d s (q - 32) |

d, e and m are float16.

Shapes: R rows, N blocks, J groups of a block, K columns of a block, B bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qaudit.core.linears import StoredWeight
from qaudit.support.lazy import Tensor, torch

Parts = dict[str, Tensor]

WIDE = 256


@dataclass(frozen=True)
class BlockType:
    """A type of llama.cpp, and the bytes of each part of its blocks, in order."""

    columns: int
    bits: int  # of a code
    parts: tuple[tuple[str, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(count for _, count in self.parts)


_HALF = ("d", 2)
TYPES = {
    "Q8_0": BlockType(32, 8, (_HALF, ("codes", 32))),
    "Q4_0": BlockType(32, 4, (_HALF, ("low", 16))),
    "Q5_0": BlockType(32, 5, (_HALF, ("high", 4), ("low", 16))),
    "Q5_1": BlockType(32, 5, (_HALF, ("m", 2), ("high", 4), ("low", 16))),
    "Q3_K": BlockType(WIDE, 3, (("high", 32), ("low", 64), ("scales", 12), _HALF)),
    "Q4_K": BlockType(WIDE, 4, (_HALF, ("e", 2), ("scales", 12), ("low", 128))),
    "Q5_K": BlockType(WIDE, 5, (_HALF, ("e", 2), ("scales", 12), ("high", 32), ("low", 128))),
    "Q6_K": BlockType(WIDE, 6, (("low", 128), ("high", 64), ("scales", 16), _HALF)),
}


@dataclass(frozen=True, eq=False)
class GgufBlocks(StoredWeight):
    """Packed blocks of a matrix, row after row."""

    packed_RB: Tensor  # uint8
    kind: str  # a key of TYPES

    def decode(self) -> Tensor:
        kind = TYPES[self.kind]
        blocks_NB = self.packed_RB.reshape(-1, kind.nbytes)
        parts, start = {}, 0
        for name, count in kind.parts:
            parts[name] = blocks_NB[:, start : start + count].contiguous()
            start += count
        return _DECODERS[self.kind](parts).reshape(len(self.packed_RB), -1)

    @property
    def nbits(self) -> int:
        return 8 * self.packed_RB.numel()


def assembled(kind: str, parts: Parts) -> Tensor:
    return torch.cat([parts[name].reshape(len(parts["d"]), -1) for name, _ in TYPES[kind].parts], 1)


def half(values_N: Tensor) -> Tensor:
    """Return the bytes of float16 numbers, one a block."""
    return values_N.reshape(-1, 1).to(torch.float16).view(torch.uint8)


def widened(bytes_N2: Tensor) -> Tensor:
    return bytes_N2.view(torch.float16).float()


def interleave(codes_NK: Tensor, bits: int, width: int) -> Tensor:
    """Put codes of so many bits that are `width` columns apart into one byte."""
    count = 8 // bits
    codes_NCW: Tensor = codes_NK.unflatten(1, (-1, count, width))
    byte = codes_NCW[:, :, 0]
    for k in range(1, count):
        byte = byte | (codes_NCW[:, :, k] << (bits * k))
    return byte.flatten(1)


def separate(bytes_NB: Tensor, bits: int, width: int) -> Tensor:
    bytes_NW, mask = bytes_NB.unflatten(1, (-1, width)), (1 << bits) - 1
    every = [(bytes_NW >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(every, 2).flatten(1)


def _codes(parts: Parts) -> Tensor:
    if "e" not in parts:
        codes_NK = separate(parts["low"], 4, 16)
        return codes_NK | (separate(parts["high"], 1, 1) << 4) if "high" in parts else codes_NK
    codes_NK = separate(parts["low"], 4, 32)
    return codes_NK | (separate(parts["high"], 1, 32) << 4) if "high" in parts else codes_NK


def _about(middle: int) -> Callable[[Parts], Tensor]:
    return lambda parts: (_codes(parts).float() - middle) * widened(parts["d"])


def _q8_0(parts: Parts) -> Tensor:
    return parts["codes"].view(torch.int8).float() * widened(parts["d"])


def _q5_1(parts: Parts) -> Tensor:
    return _codes(parts).float() * widened(parts["d"]) + widened(parts["m"])


def _q3_k(parts: Parts) -> Tensor:
    scales_NB = parts["scales"]
    s_NJ = separate(scales_NB[:, :8], 4, 8) | (separate(scales_NB[:, 8:], 2, 4) << 4)
    scale_NJ = widened(parts["d"]) * (s_NJ.float() - 32)
    codes_NK = separate(parts["low"], 2, 32) | (separate(parts["high"], 1, 32) << 2)
    codes_NJK: Tensor = (codes_NK.float() - 4).unflatten(1, (16, 16))
    return (scale_NJ[:, :, None] * codes_NJK).flatten(1)


def _with_minima(parts: Parts) -> Tensor:
    first_N4, second_N4, third_N4 = parts["scales"].chunk(3, 1)
    s_NJ = torch.cat([first_N4 & 63, (third_N4 & 15) | (first_N4 >> 6 << 4)], 1)
    t_NJ = torch.cat([second_N4 & 63, (third_N4 >> 4) | (second_N4 >> 6 << 4)], 1)
    s_NJ, t_NJ = widened(parts["d"]) * s_NJ.float(), widened(parts["e"]) * t_NJ.float()
    codes_NJK: Tensor = _codes(parts).float().unflatten(1, (8, 32))
    return (s_NJ[:, :, None] * codes_NJK - t_NJ[:, :, None]).flatten(1)


def _q6_k(parts: Parts) -> Tensor:
    scale_NJ = widened(parts["d"]) * parts["scales"].view(torch.int8).float()
    codes_NK = separate(parts["low"], 4, 64) | (separate(parts["high"], 2, 32) << 4)
    codes_NJK: Tensor = (codes_NK.float() - 32).unflatten(1, (16, 16))
    return (scale_NJ[:, :, None] * codes_NJK).flatten(1)


_DECODERS: dict[str, Callable[[Parts], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _about(8),
    "Q5_0": _about(16),
    "Q5_1": _q5_1,
    "Q3_K": _q3_k,
    "Q4_K": _with_minima,
    "Q5_K": _with_minima,
    "Q6_K": _q6_k,
}
