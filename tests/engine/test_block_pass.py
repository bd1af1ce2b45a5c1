"""The one pass, held against whole models that are quantized and run the slow way."""

from contextlib import closing

import numpy as np
import pytest
import torch

from qaudit.core.linears import InputsAccumulator
from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.core.scheme import Calibration
from qaudit.engine.gathering import capture_inputs, groups_in_passing
from qaudit.types import FULL_PRECISION
from tests.support.passes import (
    CPU,
    feed,
    on_llama,
    opened,
    plain_losses,
    plain_model,
    run,
)

SCHEMES = (
    "rtn-4bit:group=32,rtn-3bit:group=32,gptq-3bit:group=32,awq-4bit:group=32,bnb-nf4,"
    "gptaq-3bit:group=32,qronos-4bit:group=32,"
    "gptq-3bit:group=32:true_sequential=false"
)


def test_full_precision_losses_are_those_of_the_whole_model(checkpoint, tmp_path):
    found, _ = run(checkpoint, "rtn-4bit", tmp_path)
    # The same fp32 arithmetic over other batch shapes: rounding only.
    expected = plain_losses(plain_model(checkpoint))
    np.testing.assert_allclose(found[FULL_PRECISION], expected, rtol=2e-6)


@pytest.mark.parametrize("text", ["rtn-4bit:group=32", "bnb-nf4", "rtn-3bit:group=-1"])
def test_a_weight_only_scheme_is_the_whole_model_with_its_weights_replaced(
    checkpoint, tmp_path, text
):
    scheme = parse_scheme(text)
    found, _ = run(checkpoint, text, tmp_path)
    expected = plain_losses(plain_model(checkpoint, scheme))
    np.testing.assert_allclose(found[scheme.spec], expected, rtol=2e-6)


@on_llama
def test_each_scheme_is_alone_in_its_result(checkpoint, tmp_path):
    together, _ = run(checkpoint, SCHEMES, tmp_path)
    for text in SCHEMES.split(","):
        alone, _ = run(checkpoint, text, tmp_path)
        spec = parse_scheme(text).spec
        assert np.array_equal(alone[spec], together[spec])
        assert np.array_equal(alone[FULL_PRECISION], together[FULL_PRECISION])


# ---------------------------------------------------------------- quantizing in passing


@pytest.fixture
def first_block(checkpoint):
    model, batches = opened(checkpoint), feed().calibration
    hidden = [(model.embed(batch.tokens_BT), batch.valid_BT()) for batch in batches]
    blocks = model.blocks()  # a block lives until the next is asked for
    yield next(blocks), hidden
    blocks.close()


def slow_true_sequential(block, hidden, scheme):
    """Quantize group after group, with a whole pass of the calibration set for each."""
    results = []
    for group in block.groups:
        accumulator = None
        for hidden_BTD, valid_BT in hidden:
            seen = []
            linear = block.module.get_submodule(group.linears[0])
            handle = linear.register_forward_pre_hook(
                lambda _, args, seen=seen: seen.append(args[0])
            )
            block.forward(hidden_BTD)
            handle.remove()
            rows_TC = seen[0][valid_BT]
            accumulator = accumulator or InputsAccumulator(rows_TC.shape[1], CPU)
            accumulator.add(rows_TC)
        result = scheme.quantize(block.linears(group, accumulator.result()))
        block.install(result)
        results.append(result)
    return [block.forward(h) for h, _ in hidden], results


def quantized(block, groups, scheme):
    """Quantize each group as it comes; return what the scheme made of them."""
    results = []
    for group, inputs in groups:
        results.append(scheme.quantize(block.linears(group, inputs)))
        block.install(results[-1])
    return results


@torch.no_grad()
def test_one_pass_through_the_doors_equals_one_pass_per_group(first_block):
    block, hidden = first_block
    scheme = parse_scheme("gptq-4bit:group=32")
    slow_outputs, slow = slow_true_sequential(block, hidden, scheme)
    block.restore()
    fast_outputs = []
    fast = quantized(block, groups_in_passing(block, hidden, fast_outputs), scheme)
    assert [list(r.weights) for r in fast] == [list(r.weights) for r in slow]
    for a, b in zip(fast, slow, strict=True):
        assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    assert all(torch.equal(a, b) for a, b in zip(fast_outputs, slow_outputs, strict=True))


def test_a_block_that_is_calibrated_at_once_is_captured_before_its_first_linear(
    checkpoint, first_block, tmp_path
):
    given = {}

    def observe(scheme, linears, quantized):
        given[scheme.true_sequential, linears.block, next(iter(linears.weights))] = linears.inputs

    schemes = "gptq-3bit:group=32,gptq-3bit:group=32:true_sequential=false"
    run(checkpoint, schemes, tmp_path, observe=observe)
    first, *later = [key for key in given if key[1] == 0 and not key[0]]
    assert torch.equal(given[first].gram_CC, given[True, *first[1:]].gram_CC)
    for key in later:  # what earlier linears of the block do to it is not in it
        assert not torch.equal(given[key].gram_CC, given[True, *key[1:]].gram_CC)
    block, hidden = first_block
    with torch.no_grad():
        captured = capture_inputs(block, hidden)
    for group in block.groups:
        assert torch.equal(captured.get(group).gram_CC, given[False, 0, group.linears[0]].gram_CC)


@torch.no_grad()
def test_a_failure_in_the_middle_of_a_block_leaves_no_thread_behind(first_block):
    import threading

    block, hidden = first_block

    before = threading.active_count()
    with (
        pytest.raises(RuntimeError, match="no"),
        closing(groups_in_passing(block, hidden, [])) as groups,
    ):
        next(groups)
        raise RuntimeError("no")
    assert threading.active_count() == before
    block.restore()
    block.forward(hidden[0][0])  # and the hooks are gone: this would wait for ever


def test_calibration_kinds_are_what_the_pass_knows():
    kinds = set(Calibration) - {Calibration.WHOLE_BLOCK}  # tests/engine/test_whole_block.py
    assert {s.calibration for s in parse_schemes([SCHEMES])} == kinds
