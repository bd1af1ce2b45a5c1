import numpy as np
import pytest
import torch

from qaudit.core.linears import InputsAccumulator


def activations(tokens, columns, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator)
    return (x * torch.exp(torch.randn(columns, generator=generator))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 7, 64, 65, 200, 600])
def test_equals_the_double_precision_product(columns, dtype):
    x = activations(300, columns, dtype)
    accumulator = InputsAccumulator(columns)
    for batch in x.split(128):
        accumulator.add(batch)
    inputs = accumulator.result()
    wide = x.double().numpy()
    expected = wide.T @ wide
    # Products are exact or rounded to 6e-8; 300 of them are summed in float32, whose rounding
    # grows no faster than their number: 300 * 6e-8 of the sum of magnitudes, in the worst case.
    bound = 300 * 6e-8 * (np.abs(wide).T @ np.abs(wide))
    assert (np.abs(inputs.gram_CC.numpy() - expected) <= bound).all()
    np.testing.assert_allclose(inputs.absmean_C.numpy(), np.abs(wide).mean(0), rtol=1e-5)
    assert inputs.tokens == 300
    assert torch.equal(inputs.gram_CC, inputs.gram_CC.T)
    assert np.array_equal(inputs.absmax_C.numpy(), np.abs(wide).max(0))
    assert inputs.gram_CC.dtype == inputs.absmean_C.dtype == torch.float32


def test_batches_of_any_shape_are_runs_of_tokens_and_change_no_earlier_result():
    x = activations(24, 10, torch.float32).round()  # whole numbers, whose sums are exact
    flat, shaped = InputsAccumulator(10), InputsAccumulator(10)
    empty = shaped.result()
    flat.add(x)
    shaped.add(x.view(2, 3, 4, 10))
    early, gram = shaped.result(), flat.result().gram_CC
    shaped.add(x)
    assert torch.equal(early.gram_CC, gram)
    assert early.tokens == 24
    assert torch.equal(shaped.result().gram_CC, 2 * gram)
    assert empty.tokens == 0
    assert not empty.gram_CC.any()
    assert not empty.absmean_C.any()


def test_the_drift_is_summed_from_differences():
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(300, 70, generator=generator)
    full = own + 1e-3 * torch.randn(300, 70, generator=generator)
    inputs = InputsAccumulator(70)
    inputs.add(own[:100].reshape(4, 25, 70), full[:100].reshape(4, 25, 70))
    inputs.add(own[100:], full[100:])
    drift_CC = inputs.result().drift_CC
    expected = (full.double() - own.double()).T @ own.double()
    # Sums of 300 float32 products; the difference itself is rounded to 2^-24 of an input.
    assert torch.allclose(drift_CC.double(), expected, rtol=0, atol=1e-4 * expected.abs().max())
    alone = InputsAccumulator(70)
    alone.add(own)
    assert alone.result().drift_CC is None


def test_the_precision_setting_is_put_back_and_the_input_not_touched():
    settings = torch.backends.mkldnn.matmul
    before, accumulator = settings.fp32_precision, InputsAccumulator(4)
    x = torch.randn(6, 4).bfloat16().requires_grad_()
    copy = x.detach().clone()
    accumulator.add(x)
    assert settings.fp32_precision == before
    assert torch.equal(x.detach(), copy)
    assert not accumulator.result().gram_CC.requires_grad
    with pytest.raises(RuntimeError):
        accumulator.add(torch.ones(2, 5).bfloat16())
    assert settings.fp32_precision == before
