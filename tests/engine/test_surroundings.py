"""What modules around groups return, against the same modules run by hand on the whole model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qaudit.core.linears import Linears, Quantized
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Scheme
from tests.support.whole import FAMILIES, groups_here, save, tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_are_those_of_attention_and_mlp_in_the_whole_model(tmp_path, family, monkeypatch):
    folder, text = save(tmp_path / "model", family), tokens(1)[:4]
    errors: dict[tuple[int, str], float] = {}

    def quantize(scheme: Scheme, linears: Linears) -> Quantized:
        if linears.around is not None:
            halved = {name: weight_RC / 2 for name, weight_RC in linears.weights.items()}
            first = next(iter(linears.weights)).rpartition(".")[0]
            same, half = linears.around([lambda: linears.weights, lambda: halved])
            assert same == 0
            errors[linears.block, first] = half
        # What is installed must not show in what later groups are compared by.
        return Quantized({name: 0 * one_RC for name, one_RC in linears.weights.items()}, 0)

    spec = "awq-4bit:preset=autoawq:group=64"
    monkeypatch.setattr(type(parse_scheme(spec)), "quantize", quantize)
    groups_here(folder, spec, text)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected: dict[tuple[int, str], float] = {}
    halved = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            for name, linears in halved.items():
                outputs = []
                module = layer.get_submodule(name)
                handle = module.register_forward_hook(
                    lambda _, given, out, outputs=outputs: outputs.append(
                        out[0] if isinstance(out, tuple) else out
                    )
                )
                for factor in (1.0, 0.5, 2.0):
                    for linear in linears:
                        module.get_submodule(linear).weight.mul_(factor)
                    if factor != 2:
                        model(text)
                handle.remove()
                expected[index, name] = float((outputs[0] - outputs[1]).square().sum())
    assert errors.keys() == expected.keys()
    # Float32 sums in batches of another shape.
    np.testing.assert_allclose(
        [errors[key] for key in expected], list(expected.values()), rtol=1e-4
    )
