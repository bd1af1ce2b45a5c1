"""On a real GPU, by `make gpu`: what the pretended one promises, kernels and graphs included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.column_loops import FUSED, GRAPH, LOOPS, PLAIN, _difference, choose
from qaudit.core.gptq_block import Pull, quantize_block
from qaudit.core.grid import fit
from qaudit.core.registry import parse_schemes
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.device_check import check_device
from qaudit.engine.hidden_states import HiddenStates
from qaudit.model.blocks import BlockModel
from tests.support.awkward import NAMES, made, short
from tests.support.passes import feed, losses, run

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# Schemes that follow gradients or walk through columns amplify the order in which a GPU adds.
NEAR, AMPLIFIED = 1e-4, 3e-2
ROUNDED = {name for name in NAMES if name.startswith(("rtn", "gguf", "bnb-nf4", "bnb-fp4", "hqq"))}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model"), "plain")


def on_gpu(folder, schemes, states, device_limit=10**9):
    model = BlockModel(folder, WeightFolder(folder), dtype=torch.float32, device=CUDA)
    with HiddenStates(states, 10**9, CUDA, device_limit) as streams:
        tallies = run_blocks(model, feed(), parse_schemes([schemes]), streams)
    return {name: losses(feed(), tally) for name, tally in tallies.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_scheme_has_the_cpus_losses(name, plain, tmp_path):
    expected, _ = run(plain, short(name), tmp_path)
    for stream, read in on_gpu(plain, short(name), tmp_path).items():
        near = NEAR if stream == "fp" or name in ROUNDED else AMPLIFIED
        np.testing.assert_allclose(read, expected[stream], rtol=near, err_msg=stream)


def test_states_on_the_host_change_no_bit(plain, tmp_path):
    kept, moved = (on_gpu(plain, "rtn-4bit,gptq-4bit", tmp_path, limit) for limit in (10**9, 0))
    for name in kept:
        np.testing.assert_array_equal(moved[name], kept[name])


def test_the_same_pass_gives_the_same_bits(plain, tmp_path):
    first, again = (on_gpu(plain, "gptq-4bit,awq-4bit", tmp_path) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(again[name], first[name])


def test_the_kernel_or_the_graph_is_taken():
    loop, note = choose([4096, 11008], CUDA)
    assert loop != PLAIN, note


@pytest.mark.parametrize("loop", [FUSED, GRAPH])
def test_a_loop_has_the_plain_loops_codes(loop):
    assert _difference(LOOPS[loop], [64, 4096, 11008], CUDA) is None


@pytest.mark.parametrize("columns", [128, 77])
@pytest.mark.parametrize("pulls", [False, True], ids=["alone", "pulling"])
def test_a_graph_gives_every_bit_of_the_plain_loop(columns, pulls):
    for seed in range(3):
        random = torch.Generator(CUDA).manual_seed(seed)
        weight_BR, target_BR = (
            torch.randn(columns, 300, generator=random, device=CUDA) for _ in range(2)
        )
        lower_BB = torch.randn(columns, columns, generator=random, device=CUDA).tril(-1) / 20
        lower_BB += torch.eye(columns, device=CUDA)
        grid_PR = fit(target_BR, 4, symmetric=True, dim=0)
        results = []
        for round_block in (quantize_block, LOOPS[GRAPH]):
            error_BR, rounded_BR = weight_BR.clone(), target_BR.clone()
            pull = Pull(lower_BB.tril(-1), torch.zeros_like(target_BR)) if pulls else None
            round_block(error_BR, rounded_BR, lower_BB, grid_PR, [0] * columns, pull)
            results.append((error_BR, rounded_BR))
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_doctors_block_has_the_cpus_losses(dtype):
    checked = check_device(CUDA, dtype)
    assert checked.wrong == ()
    assert checked.rate > 1e11
