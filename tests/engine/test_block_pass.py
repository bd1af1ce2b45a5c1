"""The one pass, held against whole models that are quantized and run the slow way."""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

from qaudit.core.linears import InputsAccumulator
from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.core.scheme import Calibration
from qaudit.engine.gathering import capture_inputs, groups_in_passing
from qaudit.types import FULL_PRECISION
from tests.support.passes import (
    CALIBRATION,
    CPU,
    SCHEMES,
    feed,
    on_llama,
    opened,
    plain_losses,
    plain_model,
    run,
    spec_of,
)


@pytest.mark.parametrize("text", [None, "rtn-4bit:group=32", "bnb-nf4", "rtn-3bit:group=-1"])
def test_a_pass_is_the_whole_model_with_its_weights_replaced(checkpoint, finished, text):
    scheme = text and parse_scheme(text)
    # The same fp32 arithmetic over other batch shapes: rounding only.
    expected = plain_losses(plain_model(checkpoint, scheme))
    found = finished.losses[scheme.spec if scheme else FULL_PRECISION]
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@on_llama
def test_each_scheme_is_alone_in_its_result(checkpoint, finished, tmp_path):
    for text in SCHEMES[4:9]:  # what calibrates
        alone, _ = run(checkpoint, text, tmp_path)
        assert np.array_equal(alone[spec_of(text)], finished.losses[spec_of(text)])
        assert np.array_equal(alone[FULL_PRECISION], finished.losses[FULL_PRECISION])


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


@torch.no_grad()
def test_one_pass_through_the_doors_equals_one_pass_per_group(first_block):
    block, hidden = first_block
    scheme, fast, fast_outputs = parse_scheme("gptq-4bit:group=32"), [], []
    slow_outputs, slow = slow_true_sequential(block, hidden, scheme)
    block.restore()
    for group, inputs in groups_in_passing(block, hidden, fast_outputs):
        fast.append(scheme.quantize(block.linears(group, inputs)))
        block.install(fast[-1])
    assert [list(r.weights) for r in fast] == [list(r.weights) for r in slow]
    for a, b in zip(fast, slow, strict=True):
        assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    assert all(torch.equal(a, b) for a, b in zip(fast_outputs, slow_outputs, strict=True))


@torch.no_grad()
def test_a_block_that_is_calibrated_at_once_is_captured_before_its_first_linear(
    finished, first_block
):
    block, hidden = first_block
    captured = capture_inputs(block, hidden)
    for k, group in enumerate(block.groups):
        in_order, at_once = (
            finished.linears[spec_of(f"gptq-3bit:group=32{more}"), 0, group.linears[0]][0].gram_CC
            for more in ("", ":true_sequential=false")
        )
        # What earlier linears of the block do to it is not in it.
        assert torch.equal(at_once, in_order) == (k == 0)
        assert torch.equal(captured.get(group).gram_CC, at_once)


@torch.no_grad()
def test_a_failure_in_the_middle_of_a_block_leaves_no_thread_behind(first_block):
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
    assert {s.calibration for s in parse_schemes(SCHEMES)} == kinds


# ---------------------------------------------------------------- both calibration streams


@torch.no_grad()
def linear_inputs(model):
    """Return what every linear of a whole model reads of the calibration text."""
    read = {}
    for k, layer in enumerate(model.model.layers):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):

                def keep(_, args, place=(k, name)):
                    read.setdefault(place, []).append(args[0][0])

                module.register_forward_pre_hook(keep)
    for window in CALIBRATION:
        model(input_ids=torch.from_numpy(window.tokens.astype("int64"))[None], use_cache=False)
    return {place: torch.cat(parts) for place, parts in read.items()}


def test_the_drift_is_that_of_two_whole_models_and_for_schemes_that_ask(checkpoint, finished):
    gptaq, *without = map(spec_of, ("gptaq-3bit:group=32", "gptq-3bit:group=32", SCHEMES[5]))
    seen = {
        tuple(place): given for (spec, *place), given in finished.linears.items() if spec == gptaq
    }
    full, quantized = plain_model(checkpoint), plain_model(checkpoint)
    for (block, name), (_, weight) in seen.items():
        quantized.model.layers[block].get_submodule(name).weight.data = weight
    # Every linear reads what all quantized linears before it produce, and none behind it.
    x_full, x_own = linear_inputs(full), linear_inputs(quantized)
    assert set(x_full) == set(seen)
    for place, (inputs, _) in seen.items():
        expected = (x_full[place] - x_own[place]).double().T @ x_own[place].double()
        if place == (0, "self_attn.q_proj"):
            assert not inputs.drift_CC.any()  # nothing is quantized before it
        # Inputs in float32 agree to a few units in the last place, of sums over 250 tokens.
        size = float((x_own[place].double().T @ x_own[place].double()).abs().max())
        assert float((inputs.drift_CC - expected).abs().max()) < 1e-5 * size
        assert all(finished.linears[spec, *place][0].drift_CC is None for spec in without)
    moved = max(float(inputs.drift_CC.abs().max()) for inputs, _ in seen.values())
    assert moved > 1e-3
