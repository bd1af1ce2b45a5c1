"""Presets of toolchains against their published arithmetic, re-derived in double precision.

AutoGPTQ is archived and imports no more: its loop is the paper's, with columns by falling
diagonal, scales taken on the way and 0.01 of the mean diagonal. llm-compressor takes scales from
the original weights. Both are held against their libraries, too, where these run (`make peers`).
"""

from __future__ import annotations

import numpy as np
import pytest

from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Calibration
from tests.support.correlated import problem
from tests.support.reference.plain_gptq import gptq

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
