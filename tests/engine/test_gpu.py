"""On a real GPU, by `make gpu`: what the pretended one promises, kernels included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qaudit.core.column_loops import FUSED, LOOPS, PLAIN, _difference, choose
from qaudit.engine.doctor import check_device
from tests.support.awkward import NAMES, made, short
from tests.support.passes import opened, run

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# Schemes that follow gradients or walk through columns amplify the order in which a GPU adds.
NEAR, AMPLIFIED = 1e-4, 3e-2
ROUNDED = {name for name in NAMES if name.startswith(("rtn", "gguf", "bnb-nf4", "bnb-fp4", "hqq"))}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model"), "plain")


def on_gpu(folder, schemes, states, device_limit=10**9):
    return run(opened(folder, device=CUDA), schemes, states, device_limit=device_limit)[0]


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


def test_the_kernel_is_taken():
    loop, note = choose([4096, 11008], CUDA)
    assert loop != PLAIN, note


def test_the_kernel_has_the_plain_loops_codes():
    assert _difference(LOOPS[FUSED], [64, 4096, 11008], CUDA) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_doctors_block_has_the_cpus_losses(dtype):
    checked = check_device(CUDA, dtype)
    assert checked.wrong == ()
    assert checked.rate > 1e11
