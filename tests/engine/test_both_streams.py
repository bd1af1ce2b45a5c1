"""What a scheme sees of both calibration streams, against two whole models run by the library."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.passes import CALIBRATION, plain_model, run

SPEC = "gptaq-3bit:group=32"


def observed(folder, tmp_path, spec=SPEC):
    """Return what a scheme was given and made of each linear, by block and name."""
    seen = {}

    def observe(scheme, linears, quantized):
        for name in linears.weights:
            seen[linears.block, name] = linears.inputs, quantized.weights[name].clone()

    run(folder, spec, tmp_path, observe=observe)
    return seen


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


def test_the_drift_is_that_of_two_whole_models(checkpoint, tmp_path):
    seen = observed(checkpoint, tmp_path)
    full, own = plain_model(checkpoint), plain_model(checkpoint)
    for (block, name), (_, weight) in seen.items():
        own.model.layers[block].get_submodule(name).weight.data = weight
    # Every linear reads what all quantized linears before it produce, and none behind it.
    x_full, x_own = linear_inputs(full), linear_inputs(own)
    assert set(x_full) == set(seen)
    for place, (inputs, _) in seen.items():
        expected = (x_full[place] - x_own[place]).double().T @ x_own[place].double()
        if place == (0, "self_attn.q_proj"):
            assert not inputs.drift_CC.any()  # nothing is quantized before it
        # Inputs in float32 agree to a few units in the last place, of sums over 250 tokens.
        size = float((x_own[place].double().T @ x_own[place].double()).abs().max())
        assert float((inputs.drift_CC - expected).abs().max()) < 1e-5 * size
    moved = max(float(inputs.drift_CC.abs().max()) for inputs, _ in seen.values())
    assert moved > 1e-3


def test_only_schemes_that_ask_get_a_drift(checkpoint, tmp_path):
    for spec in ("gptq-3bit:group=32", "awq-4bit:group=32"):
        seen = observed(checkpoint, tmp_path, spec)
        assert all(inputs.drift_CC is None for inputs, _ in seen.values())
