"""The one pass, held against whole models that are quantized and run the slow way."""

from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.gram import InputsAccumulator
from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.core.scheme import Calibration
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.gathering import capture_inputs, groups_by_returning, groups_in_passing
from qaudit.engine.hidden_states import HiddenStates
from qaudit.model.blocks import BlockModel
from qaudit.types import FULL_PRECISION
from tests.support.filled import filled
from tests.support.passes import (
    CALIBRATION,
    CPU,
    feed,
    on_llama,
    plain_losses,
    run,
)

SCHEMES = (
    "rtn-4bit:group=32,rtn-3bit:group=32,gptq-3bit:group=32,awq-4bit:group=32,bnb-nf4,"
    "gptaq-3bit:group=32,qronos-4bit:group=32,"
    "gptq-3bit:group=32:true_sequential=false"
)


def test_full_precision_losses_are_those_of_the_whole_model(checkpoint, tmp_path):
    found, _ = run(checkpoint, "rtn-4bit", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    # The same fp32 arithmetic over other batch shapes: rounding only.
    np.testing.assert_allclose(found[FULL_PRECISION], plain_losses(model), rtol=2e-6)


@pytest.mark.parametrize("text", ["rtn-4bit:group=32", "bnb-nf4", "rtn-3bit:group=-1"])
def test_a_weight_only_scheme_is_the_whole_model_with_its_weights_replaced(
    checkpoint, tmp_path, text
):
    scheme = parse_scheme(text)
    found, _ = run(checkpoint, text, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.data
            module.weight.data = scheme.quantize(Linears({"w": weight})).weights["w"]
    np.testing.assert_allclose(found[scheme.spec], plain_losses(model), rtol=2e-6)


@on_llama
def test_each_scheme_is_alone_in_its_result(checkpoint, tmp_path):
    together, _ = run(checkpoint, SCHEMES, tmp_path)
    for text in SCHEMES.split(","):
        alone, _ = run(checkpoint, text, tmp_path)
        spec = parse_scheme(text).spec
        assert np.array_equal(alone[spec], together[spec])
        assert np.array_equal(alone[FULL_PRECISION], together[FULL_PRECISION])


@on_llama
def test_spilling_changes_no_bit(checkpoint, tmp_path):
    kept, _ = run(checkpoint, SCHEMES, tmp_path)
    for limit in (0, 40_000):
        spilled, _ = run(checkpoint, SCHEMES, tmp_path, limit=limit)
        assert all(np.array_equal(kept[name], spilled[name]) for name in filled(kept))
        assert not list(tmp_path.iterdir())


def test_bits_are_counted_over_every_linear_of_every_block(checkpoint, tmp_path):
    _, tallies = run(checkpoint, "rtn-4bit:group=32", tmp_path)
    tally = tallies[parse_scheme("rtn-4bit:group=32").spec]
    assert tally.weights == 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
    assert tally.bits_per_weight == 4 + 16 / 32


# ---------------------------------------------------------------- quantizing in passing


@pytest.fixture
def first_block(checkpoint):
    model = BlockModel(checkpoint, WeightFolder(checkpoint), dtype=torch.float32, device=CPU)
    batches = feed().calibration
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


@torch.no_grad()
def test_going_back_to_the_entrance_for_each_group_changes_no_bit(first_block):
    block, hidden = first_block
    scheme = parse_scheme("gptq-4bit:group=32")
    passing_outputs = []
    passing = quantized(block, groups_in_passing(block, hidden, passing_outputs), scheme)
    block.restore()
    returning = quantized(block, groups_by_returning(block, lambda: hidden), scheme)
    outputs = [block.forward(hidden_BTD) for hidden_BTD, _ in hidden]
    for a, b in zip(passing, returning, strict=True):
        assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    assert all(torch.equal(out, outputs[k]) for k, out in enumerate(passing_outputs))
    block.restore()
    block.forward(hidden[0][0])  # and the hooks are gone


def test_a_block_that_is_calibrated_at_once_is_captured_before_its_first_linear(
    checkpoint, first_block, tmp_path
):
    given = {}

    def observe(scheme, linears, quantized):
        given[scheme.true_sequential, linears.block, next(iter(linears.weights))] = linears.inputs

    model = BlockModel(checkpoint, WeightFolder(checkpoint), dtype=torch.float32, device=CPU)
    schemes = parse_schemes(["gptq-3bit:group=32,gptq-3bit:group=32:true_sequential=false"])
    with HiddenStates(tmp_path, 10**9, CPU) as states:
        run_blocks(model, feed(), schemes, states, observe=observe)
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
def test_statistics_leave_padding_out_and_count_a_shared_input_once(first_block):
    block, hidden = first_block
    captured = capture_inputs(block, hidden)
    tokens = sum(len(w.tokens) for w in CALIBRATION)
    assert {captured.get(group).tokens for group in block.groups} == {tokens}


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
