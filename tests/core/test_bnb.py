import logging

import bitsandbytes
import pytest
import torch

from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme
from qaudit.errors import SourceError

WHOLE = [(16, 64), (3, 128), (7, 320)]  # rows of whole blocks
CUT = [(24, 96), (5, 100), (3, 34), (8, 32), (2, 160)]  # blocks that run over the ends of rows
SHAPES = WHOLE + CUT
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (0.05 * torch.randn(shape, generator=generator)).to(dtype)


def quantized(spec, values):
    return parse_scheme(spec).quantize(Linears({"w": values}))


def module_4bit(values, table, *, nested):
    """Return what a bitsandbytes module holds, dequantized by bitsandbytes itself."""
    module = bitsandbytes.nn.Linear4bit(
        *values.T.shape, bias=False, compress_statistics=nested, quant_type=table
    )
    module.weight = bitsandbytes.nn.Params4bit(
        values.clone(), compress_statistics=nested, quant_type=table, module=module
    )
    module = module.to("cpu")
    return bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WHOLE)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_four_bits_equal_linear4bit_bit_for_bit(table, nested, shape, dtype):
    values = weight(shape, dtype)
    found = quantized(f"bnb-{table}:double_quant={nested}", values).weights["w"]
    assert torch.equal(found, module_4bit(values, table, nested=nested))


@pytest.mark.parametrize("shape", CUT)
@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_blocks_that_run_over_the_ends_of_rows_keep_their_own_maximum(table, shape):
    # Not against `dequantize_4bit` of the matrix, which on AVX512 mixes up the maxima of such
    # blocks, but against the codes and maxima that bitsandbytes itself stores.
    values = weight(shape)
    packed, state = bitsandbytes.functional.quantize_4bit(values, blocksize=64, quant_type=table)
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten().long()
    maxima = state.absmax.repeat_interleave(64)[: values.numel()]
    expected = (state.code[codes] * maxima).reshape(shape)
    assert torch.equal(quantized(f"bnb-{table}", values).weights["w"], expected)


@pytest.mark.parametrize("shape", [(7, 13), (1, 1), (3, 65), (9, 7)])
@pytest.mark.parametrize("nested", [False, True])
def test_an_odd_number_of_weights_keeps_its_blocks(shape, nested):
    # The same numbers with one row of zeros more: every block maximum stays the same.
    values = weight(shape)
    flat = torch.cat([values.flatten(), torch.zeros(1)])[None]
    found = quantized(f"bnb-nf4:double_quant={nested}", values).weights["w"]
    longer = quantized(f"bnb-nf4:double_quant={nested}", flat).weights["w"]
    assert torch.equal(found.flatten(), longer[0, :-1])
    assert float((found - values).abs().max()) < 0.2 * float(values.abs().max())


def module_int8(values, threshold):
    module = bitsandbytes.nn.Linear8bitLt(
        *values.T.shape, bias=False, has_fp16_weights=False, threshold=threshold
    )
    module.weight = bitsandbytes.nn.Int8Params(
        values.clone(), requires_grad=False, has_fp16_weights=False
    )
    return module.to("cpu").eval()


def outlier_inputs(columns, dtype):
    x = torch.randn(2, 9, columns, generator=torch.Generator().manual_seed(4))
    x[0, 3, 5] = 40.0
    x[1, 1, 11] = -7.5
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", [6.0, 0.0, 1.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_forward_equals_linear8bitlt_bit_for_bit(shape, threshold, dtype):
    values = weight(shape, dtype)
    x = outlier_inputs(shape[1], dtype)
    result = quantized(f"bnb-int8:threshold={threshold}", values)
    forward = result.forwards["w"]
    with torch.no_grad():
        expected = module_int8(values, threshold)(x.clone())
        assert torch.equal(forward(x), expected)
        # A forward holds no state: another batch between changes nothing.
        forward(torch.ones(4, shape[1], dtype=dtype))
        assert torch.equal(forward(x), expected)


def test_int8_notes_outliers_of_a_batch_and_refuses_weights_beyond_float16_by_name():
    values = weight((4, 64))
    assert any("per batch" in note for note in quantized("bnb-int8", values).notes)
    assert not quantized("bnb-int8:threshold=0", values).notes
    values[0, 0] = 1e6
    with pytest.raises(SourceError, match="`w` holds numbers too large for float16"):
        quantized("bnb-int8", values)


def test_only_the_one_warning_per_matmul_is_silenced(caplog):
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    forward = quantized("bnb-int8", weight((4, 64))).forwards["w"]
    with caplog.at_level(logging.WARNING):
        forward(torch.ones(2, 64))
        logger.warning("something else")
        module_int8(weight((4, 64)), 6.0)(torch.ones(2, 64))
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "something else"
    assert messages[1].startswith("MatMul8bitLt: inputs will be cast")
    assert not logger.filters
