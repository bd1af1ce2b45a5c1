"""Packed codes against Python's own integers, and against the packer of compressed-tensors."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given
from hypothesis import strategies as st

from qaudit.formats.arithmetic import pack
from tests.support.filled import filled

BITS = st.integers(2, 8)


def codes_of(bits: int, rows: int, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, (rows, count), dtype=torch.uint8, generator=generator)


@given(BITS, st.integers(1, 5), st.integers(1, 100), st.integers(0, 99))
def test_a_row_of_words_is_one_long_integer(bits: int, rows: int, count: int, seed: int) -> None:
    codes_RN = codes_of(bits, rows, count, seed)
    for codes_N, words_W in filled(zip(codes_RN, pack(codes_RN, bits), strict=True)):
        integer = sum(int(code) << (k * bits) for k, code in enumerate(codes_N))
        words = [int(word) & 0xFFFFFFFF for word in words_W]
        assert sum(word << (32 * k) for k, word in enumerate(words)) == integer
        assert len(words) == -(-count * bits // 32)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [32, 77, 96])
def test_compressed_tensors_packs_alike(bits: int, count: int) -> None:
    codes_RN = codes_of(bits, 6, count)
    signed_RN = (codes_RN.int() - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(pack(codes_RN, bits), pack_to_int32(signed_RN, bits))
