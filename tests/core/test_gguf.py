"""Blocks of GGUF by their definitions, number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Linears
from qaudit.errors import SourceError

F32 = np.float32


def q8_0(block):
    d = F32(max(abs(block))) / F32(127)
    inverse = F32(0) if d == 0 else F32(1) / d
    steps = [F32(v) * inverse for v in block]
    return np.float16(d), [int(np.sign(s) * np.floor(abs(s) + F32(0.5))) for s in steps]


def q4_0(block):
    largest = max(block, key=abs)
    d = F32(largest) / F32(-8)
    inverse = F32(0) if d == 0 else F32(1) / d
    codes = [min(15, max(0, int(F32(v) * inverse + F32(8.5)))) - 8 for v in block]
    return np.float16(d), codes


@pytest.mark.parametrize(("name", "slowly"), [("q8_0", q8_0), ("q4_0", q4_0)])
@pytest.mark.parametrize("magnitude", [1e-4, 0.02, 30.0])
def test_block_by_block(name, slowly, magnitude):
    weight = magnitude * torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    weight[2, :40] = 0
    decoded = parse_scheme(f"gguf-{name}").quantize(Linears({"w": weight})).weights["w"]
    for row, rounded in zip(weight.numpy(), decoded.numpy(), strict=True):
        for start in range(0, 96, 32):
            d, codes = slowly(row[start : start + 32])
            assert rounded[start : start + 32].tolist() == [float(F32(d) * F32(c)) for c in codes]


@pytest.mark.parametrize("name", ["gguf-q8_0", "gguf-q4_0"])
def test_rows_that_32_does_not_divide_are_refused_by_name(name):
    with pytest.raises(SourceError, match=r"`mlp\.up` has rows of 48 columns") as refused:
        parse_scheme(name).quantize(Linears({"mlp.up": torch.ones(2, 48)}))
    assert name in refused.value.hint
