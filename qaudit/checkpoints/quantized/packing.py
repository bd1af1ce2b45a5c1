"""Codes of 2 to 8 bits in 32-bit words, from the low bits upwards, without gaps.

Code i begins at bit i * bits and can go on in the next word. GPTQ, compressed-tensors and MLX
pack alike; AWQ permutes each eight codes first.

Shapes: R rows, N codes of a row, W words of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WORD = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours is in nibble 0, 1, ... of a word


def words_for(codes: int, bits: int) -> int:
    """Return the words that hold so many codes."""
    return -(-codes * bits // WORD)


def pack(codes_RN: Tensor, bits: int) -> Tensor:
    """Return the int32 words of unsigned codes; bits behind the last code are zero."""
    import torch

    rows, count = codes_RN.shape
    padded = torch.nn.functional.pad(codes_RN, (0, -count % WORD)).view(rows, -1, WORD)
    words = torch.zeros(rows, padded.shape[1], bits, dtype=torch.int32)
    for i in range(WORD):
        word, shift = divmod(i * bits, WORD)
        code = padded[..., i].to(torch.int32)
        words[..., word] |= code << shift
        if shift + bits > WORD:
            words[..., word + 1] |= code >> (WORD - shift)
    return words.view(rows, -1)[:, : words_for(count, bits)].contiguous()


def unpack(words_RW: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` codes of each row, as uint8."""
    import torch

    rows = len(words_RW)
    padded = torch.nn.functional.pad(words_RW, (0, -words_RW.shape[1] % bits)).view(rows, -1, bits)
    codes = torch.empty(rows, padded.shape[1], WORD, dtype=torch.uint8)
    mask = 2**bits - 1
    for i in range(WORD):
        word, shift = divmod(i * bits, WORD)
        code = padded[..., word] >> shift
        if shift + bits > WORD:  # the shift of a negative word brings ones
            low = 2 ** (WORD - shift) - 1
            code = (code & low) | (padded[..., word + 1] << (WORD - shift))
        codes[..., i] = (code & mask).to(torch.uint8)
    return codes.view(rows, -1)[:, :count].contiguous()


def in_awq_order(codes_RN: Tensor) -> Tensor:
    """Permute the columns of each eight as AWQ's GEMM layout has them."""
    return codes_RN.view(len(codes_RN), -1, 8)[..., list(AWQ_ORDER)].reshape(codes_RN.shape)


def from_awq_order(codes_RN: Tensor) -> Tensor:
    """Put columns back into their own order."""
    order = [AWQ_ORDER.index(k) for k in range(8)]
    return codes_RN.view(len(codes_RN), -1, 8)[..., order].reshape(codes_RN.shape)
