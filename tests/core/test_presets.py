"""Presets of toolchains against their published arithmetic, re-derived in double precision.

AutoGPTQ is archived and imports no more: its loop is the paper's, with columns by falling
diagonal, scales taken on the way and 0.01 of the mean diagonal. llm-compressor takes scales from
the original weights. The searches of AWQ are multiplied out on the inputs of whole blocks. All but
AutoGPTQ are held against their libraries, too (`make peers`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qaudit.core.linears import Inputs
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Calibration
from tests.support.correlated import problem
from tests.support.filled import filled
from tests.support.reference.plain_awq import clip_and_round, round_groups, search_scale
from tests.support.reference.plain_gptq import gptq
from tests.support.whole import FAMILIES, groups_here, save, tokens

TOOLS = {
    "autogptq": {"act_order": True, "damp": 0.01},
    "llm-compressor": {"act_order": True, "static_groups": True, "damp": 0.01},
    "gptqmodel": {"act_group_aware": True, "damp": 0.05},
    "paper-a": {"act_order": True, "damp": 0.05},
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("bits", "columns", "group"), [(4, 256, 128), (3, 300, 64)])
def test_a_preset_is_the_loop_of_its_tool(tool, bits, columns, group):
    linears = problem(16, columns, seed=columns)
    spec = f"gptq-{bits}bit:preset={tool}:group={group}:scale_dtype=float32"
    codes, expected = gptq(
        linears.weights["linear"].numpy(),
        linears.inputs.gram_CC.numpy(),
        bits=bits,
        group=group,
        **TOOLS[tool],
    )
    quantized = parse_scheme(spec).quantize(linears)
    # Scales come from two ways to the same compensated weights in float64.
    assert np.abs(quantized.weights["linear"].numpy() - expected).max() < 1e-12
    np.testing.assert_array_equal(quantized.stored["linear"].codes_RC.numpy(), codes)


def test_only_llm_compressor_takes_a_blocks_statistics_at_once():
    at_once = {
        tool
        for tool in TOOLS
        if parse_scheme(f"gptq-4bit:preset={tool}").calibration is Calibration.OWN_BLOCKS
    }
    assert at_once == {"llm-compressor"}


# ------------------------------------------------------------------------------------ AWQ

FOLDED = {  # the first linears of the groups whose inputs can be divided
    "llama": {"q_proj", "gate_proj", "down_proj"},  # o_proj: 4 query heads read 2 value heads
    "olmo2": {"down_proj"},
}
RATIOS = {
    "autoawq": [step / 20 for step in range(20)],
    "llm-compressor": [None, *(step / 18 for step in range(19))],
}


@pytest.fixture(scope="module", params=FAMILIES)
def block(request, tmp_path_factory):
    """Return a model's first block by group, in double precision: linears, inputs and fold."""
    folder = save(tmp_path_factory.mktemp(request.param), request.param)
    text = tokens(1)[:4]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    inputs = {}
    for name, module in model.model.layers[0].named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, given, name=name: inputs.update({name: given[0].flatten(0, 1).numpy()})
            )
    with torch.no_grad():
        model(text)
    groups = {}
    for linears, _ in groups_here(folder, "awq-4bit:group=64", text):
        first = next(iter(linears.weights))
        if linears.block == 0:
            x = inputs[first]
            gram_CC, absmean_C = torch.from_numpy(x.T @ x), torch.from_numpy(np.abs(x).mean(0))
            weights = {name: weight.double() for name, weight in linears.weights.items()}
            moments = Inputs(gram_CC, absmean_C, len(x))
            name = first.rpartition(".")[2]
            groups[name] = replace(linears, weights=weights, inputs=moments), x
    assert set(groups) == {"q_proj", "o_proj", "gate_proj", "down_proj"}
    return groups, FOLDED[request.param]


@pytest.mark.parametrize("tool", RATIOS)
def test_awq_searches_a_block_as_its_tool_does(block, tool):
    groups, folded = block
    scheme = parse_scheme(f"awq-4bit:preset={tool}:group=64:scale_dtype=float32")
    grid = {"bits": 4, "group": 64, "zero_point": True}
    for first, (linears, x) in filled(groups.items()):
        found, quantized = scheme.search_scales(linears), scheme.quantize(linears)
        assert (found is not None) == (first in folded)
        scale = np.ones(x.shape[1])
        if found is not None:
            joined = torch.cat(list(linears.weights.values())).numpy()
            scale = search_scale(joined, x, **grid, ratios=RATIOS[tool])
            # A sum over tokens in another order; no two ratios have losses as near as that.
            np.testing.assert_allclose(found, scale, rtol=1e-12)
            scale = found.numpy()
        for name, weight in linears.weights.items():
            scaled = weight.numpy() * scale
            if tool == "llm-compressor" or name.endswith(("q_proj", "k_proj")):
                expected = round_groups(scaled, **grid)
            else:
                expected = clip_and_round(scaled, x / scale, **grid)
            # The same arithmetic on the same scales: the codes are equal, and each product is
            # rounded alike but for the last division.
            np.testing.assert_allclose(quantized.weights[name], expected / scale, rtol=1e-12)
