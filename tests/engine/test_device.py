"""The engine on a pretended GPU: the numbers of the CPU, and no mixture, race or extra wait."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core import fidelity
from qaudit.core.fidelity import head_rows
from qaudit.core.gptq_solver import factor_backwards
from qaudit.core.registry import parse_schemes
from qaudit.core.schemes.duquant import greedy_rotation
from qaudit.engine.hidden_states import HiddenStates
from qaudit.errors import is_out_of_memory
from qaudit.executors.part import _free_for_streams
from qaudit.model.device import free_nbytes
from qaudit.planning.machine import Footprint
from qaudit.planning.sizes import Load, Sizes, TextSize
from tests.support.awkward import NAMES, SHAPES, made, short
from tests.support.passes import opened, run, tallies_of
from tests.support.pretended_device import pretended
from tests.support.schemes import LEARNED

# Waits of the host in two blocks, and copies of memory that is not pinned: lower them where they
# fall, and raise none. A scheme that is not here may wait as often as rounding to nearest.
WAITS = {
    "atom": 124, "awq": 94, "base-q-w4a4": 203, "bnb-int8": 57, "duquant": 100, "flatquant": 171,
    "gptaq": 102, "gptq": 94, "hqq": 71, "mr-gptq": 108, "mxfp4": 71, "mxfp4a16": 71, "nvfp4": 90,
    "nvfp4a16": 71, "ostquant": 257, "qronos": 110, "quarot": 140, "quarot-rtn": 65, "quik": 140,
    "smoothquant": 62, "spinquant": 257,
    **{name: 57 for name in NAMES if name.startswith("gguf-")},
}  # fmt: skip
WAITS |= {f"{base}-mix": WAITS[base] for base in ("awq", "gptq", "hqq")}  # each as its base
UPLOADS = {"bnb-fp4": 59, "bnb-nf4": 59, "fp8": 59, "mr-gptq": 74}
UPLOADS |= {"base-q-w4a4": 76, "ostquant": 64, "spinquant": 64}
OF_ROUNDING, UPLOADS_OF_MOST = 43, 62
NOISE = 1e-4  # of a loss, where gradients are followed


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model"), "plain")


def on(device, folder, schemes, states, device_limit=10**9, limit=10**9):
    model = opened(folder, device=device)
    return run(model, schemes, states, limit, device_limit=device_limit)[0]


def must_be_equal(read, expected, tolerance=0.0):
    assert read.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(read[name], expected[name], rtol=tolerance, err_msg=name)


# One type of GGUF, one of floats, one of bitsandbytes and one learned transform run here, all of
# them nightly.
NIGHTLY = {"duquant", "ostquant", "spinquant", *(n for n in NAMES if n.startswith("gguf-"))}
NIGHTLY |= {"bnb-fp4", "mxfp4", "mxfp4a16", "nvfp4a16", "quarot-rtn"}
NIGHTLY -= {"gguf-q4_k_m"}
EACH_NAME = [
    pytest.param(name, marks=pytest.mark.slow if name in NIGHTLY else ()) for name in NAMES
]


@pytest.mark.parametrize("name", EACH_NAME)
def test_a_scheme_has_the_cpus_numbers_and_seldom_waits(name, plain, tmp_path):
    expected, _ = run(plain, short(name), tmp_path)
    with pretended() as device:
        read = on("cuda", plain, short(name), tmp_path)
    must_be_equal(read, expected, NOISE if name in LEARNED else 0.0)
    waits, uploads = WAITS.get(name, OF_ROUNDING), UPLOADS.get(name, UPLOADS_OF_MOST)
    assert device.waits.total() <= waits, device.waits.most_common(5)
    assert device.uploads.total() <= uploads, device.uploads.most_common(5)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "plain"])
def test_a_shape_has_the_cpus_numbers(shape, tmp_path):
    folder = made(tmp_path / "model", shape)
    expected, _ = run(folder, "rtn-4bit,gptq-4bit", tmp_path)
    with pretended():
        must_be_equal(on("cuda", folder, "rtn-4bit,gptq-4bit", tmp_path), expected)


@pytest.mark.parametrize("limit", [10**9, 0], ids=["on the host", "in files"])
def test_spilled_states_have_the_cpus_numbers_and_come_back_pinned(limit, plain, tmp_path):
    expected, _ = run(plain, "rtn-4bit,gptq-4bit", tmp_path)
    with pretended() as device:
        read = on("cuda", plain, "rtn-4bit,gptq-4bit", tmp_path, device_limit=0, limit=limit)
    must_be_equal(read, expected)
    assert not [line for line in device.uploads if "hidden_states" in line]


def test_all_is_computed_on_the_second_device_where_it_is_named(plain, tmp_path):
    expected, _ = run(plain, "rtn-4bit,gptq-4bit", tmp_path)
    with pretended() as device:
        must_be_equal(on("cuda:1", plain, "rtn-4bit,gptq-4bit", tmp_path), expected)
    assert not device.peers


def test_seconds_are_of_the_stream_and_wait_for_no_other(plain, tmp_path):
    with pretended() as device:
        model = opened(plain, device="cuda")
        tallies = tallies_of(model, "rtn-4bit", tmp_path, device_limit=10**9)
        assert all(tally.seconds > 0 for tally in tallies.values())
    assert device.synchronized == 0


def test_only_blocks_that_are_read_ahead_are_pinned(plain):
    with pretended() as device:
        model = opened(plain, device="cuda")
        assert not device.pinned
        next(model.blocks())
    weights = WeightFolder(plain)
    blocks = [weights.read(name).nbytes for name in weights.names() if ".layers." in name]
    assert 0 < sum(device.pinned.values()) <= sum(blocks)


def test_memory_that_torch_keeps_for_later_is_free():
    with pretended(capacity=2**20):
        device = torch.device("cuda")
        kept = torch.zeros(2**17, device=device)
        del kept
        gc.collect()
        assert torch.cuda.mem_get_info(device)[0] == 2**19
        assert free_nbytes(device) == 2**20


def test_the_limit_of_hidden_states_holds_on_the_device_too():
    with pretended(capacity=10**6):
        device = torch.device("cuda")
        assert _free_for_streams(device, 100_000, None) == 800_000
        assert _free_for_streams(device, 100_000, 1000) == 1000


def test_the_head_takes_what_the_plan_prices():
    sizes = Sizes(0, 0, 0, 0, 0, 0, 1000)
    load = Load.of(parse_schemes(["rtn-4bit,rtn-3bit,rtn-8bit"]), TextSize(64, 64, 64))
    rows_NV = torch.randn(
        head_rows(1000, "cuda") // 16, 1000, generator=torch.Generator().manual_seed(0)
    )
    with pretended() as device:
        streams = rows_NV.to("cuda").chunk(4)
        targets_N = torch.arange(len(streams[0])).to("cuda")
        reference = fidelity.Reference.of(streams[0], targets_N)
        for logits_NV in streams[1:]:
            reference.compare(logits_NV, targets_N)
    assert device.reserved < Footprint(sizes, load, 4, 0, "cuda").head_nbytes / 16
    assert device.reserved > Footprint(sizes, load, 4, 0, "cuda").head_nbytes / 32


def test_what_waits_in_a_block_has_what_hidden_states_leave(tmp_path):
    with pretended(), HiddenStates(tmp_path, 10**9, torch.device("cuda"), 5000) as states:
        states.put("a", 0, torch.zeros(1000, device="cuda"))
        assert states.nbytes_inside == 1000


def test_rotations_are_chosen_without_a_wait():
    sample_NB = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    expected = greedy_rotation(sample_NB)
    with pretended() as device:
        rotation_BB = greedy_rotation(sample_NB.to("cuda"))
        assert not device.waits
        assert torch.equal(rotation_BB.cpu(), expected)


@pytest.mark.parametrize("extent", [0.1, 3.0], ids=["small errors", "large errors"])
def test_half_quadratic_steps_are_taken_without_a_wait(extent):
    weight_RC = extent * torch.randn(6, 80, generator=torch.Generator().manual_seed(0))
    expected = parse_schemes(["hqq-4bit"])[0]._fit(weight_RC)
    with pretended() as device:
        stored = parse_schemes(["hqq-4bit"])[0]._fit(weight_RC.to("cuda"))
        assert not device.waits
        for name in ("codes_RC", "scales_RG", "zeros_RG"):
            assert torch.equal(getattr(stored, name).cpu(), getattr(expected, name))


@pytest.mark.parametrize("smallest", [1.0, -1.0], ids=["definite", "not definite"])
def test_a_matrix_is_factorized_with_one_wait(smallest):
    matrix_CC = torch.diag(torch.linspace(smallest, 2, 300))
    expected = factor_backwards(matrix_CC.clone())
    with pretended() as device:
        factors = factor_backwards(matrix_CC.to("cuda"))
        assert device.waits.total() == 1
        if expected is None:
            assert factors is None
        else:
            assert all(
                torch.equal(one.cpu(), other) for one, other in zip(factors, expected, strict=True)
            )


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    ],
)
def test_libraries_that_find_no_memory_are_out_of_memory(text):
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
