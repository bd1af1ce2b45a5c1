"""Weights of one linear, and what schemes store of them, for tests of formats of files."""

from functools import cache

import torch

from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme


def weight(seed=0, rows=64, columns=96):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) / 50


def quantized_by(scheme, weight_RC):
    columns = weight_RC.shape[1]
    x_CC, ones_C = torch.eye(columns), torch.ones(columns)
    inputs = Inputs(x_CC, ones_C, columns, 2 * ones_C, sample_TC=x_CC)
    return parse_scheme(scheme).quantize(Linears({"w": weight_RC}, inputs))


def stored_of(scheme, weight_RC):
    return quantized_by(scheme, weight_RC).stored["w"]


@cache
def example(scheme):
    """Quantize a weight that has rows and blocks of zeros; the result is left as it is."""
    # bitsandbytes on a CPU decodes wrongly where blocks of 64 begin within rows.
    whole_blocks = scheme.startswith(("fp8:blocks", "gguf-", "bnb-"))
    weight_RC = weight(5, *((128, 256) if whole_blocks else (64, 96)))
    weight_RC[3], weight_RC[5, :64] = 0, 0
    return quantized_by(scheme, weight_RC)
