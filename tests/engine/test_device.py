"""The engine on a pretended GPU: the numbers of the CPU, and no mixture, race or extra wait.

A real one, kernels included, does what the pretended one promises: `make gpu`.
"""

import gc

import numpy as np
import pytest
import torch

from benchmarks.launches import EIGHTH, count, count_learned
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core import fidelity
from qaudit.core.column_loops import PLAIN, choose
from qaudit.core.fidelity import head_rows
from qaudit.core.gptq_solver import factor_backwards
from qaudit.core.linears import Linears, Quantized
from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.core.schemes.duquant import greedy_rotation
from qaudit.engine.kept_weights import LinearHashes, sha256_of
from qaudit.errors import is_out_of_memory
from qaudit.executors.part import _free_for_streams
from qaudit.model.device import free_nbytes
from qaudit.planning.machine import Footprint
from qaudit.planning.sizes import Load, Sizes, TextSize
from tests.support.filled import filled
from tests.support.passes import opened, run, tallies_of
from tests.support.pretended_device import pretended
from tests.support.schemes import LEARNED, NAMES, REFUSED, SHAPES, made, short

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


@pytest.fixture
def plain(once):
    return once(made, "plain")


def losses(spill, folder, schemes):
    """Return the losses on the CPU."""
    return run(folder, schemes, spill)[0]


def on(device, folder, schemes, states, device_limit=10**9, limit=10**9):
    return run(opened(folder, device=device), schemes, states, limit, device_limit=device_limit)[0]


def must_be_equal(read, expected, tolerance=0.0):
    assert len(read) > 1
    for name in read:
        np.testing.assert_allclose(read[name], expected[name], rtol=tolerance, err_msg=name)


# One type of GGUF, one of floats, one of bitsandbytes and one learned transform run here, all of
# them nightly.
NIGHTLY = {"duquant", "ostquant", "spinquant", *(n for n in NAMES if n.startswith("gguf-"))}
NIGHTLY |= {"bnb-fp4", "mxfp4", "mxfp4a16", "nvfp4a16", "quarot-rtn"}
NIGHTLY -= {"gguf-q4_k_m"}


def each(names, nightly):
    return [pytest.param(name, marks=pytest.mark.slow if name in nightly else ()) for name in names]


EVERY_DAY = ",".join(short(name) for name in NAMES if name not in NIGHTLY)
FEW = "rtn-4bit,gptq-4bit"


@pytest.mark.parametrize("name", each(NAMES, NIGHTLY))
def test_a_scheme_has_the_cpus_numbers_and_seldom_waits(name, plain, once, tmp_path):
    expected = once(losses, plain, short(name) if name in NIGHTLY else EVERY_DAY)
    with pretended() as device:
        read = on("cuda", plain, short(name), tmp_path)
    must_be_equal(read, expected, NOISE if name in LEARNED else 0.0)
    waits, uploads = WAITS.get(name, OF_ROUNDING), UPLOADS.get(name, UPLOADS_OF_MOST)
    assert device.waits.total() <= waits, device.waits.most_common(5)
    assert device.uploads.total() <= uploads, device.uploads.most_common(5)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "plain"])
def test_a_shape_has_the_cpus_numbers(shape, once, tmp_path):
    folder = once(made, shape)
    with pretended():
        must_be_equal(on("cuda", folder, FEW, tmp_path), once(losses, folder, FEW))


@pytest.mark.parametrize(
    ("name", "limits"),
    [("cuda", (0, 10**9)), ("cuda", (0, 0)), ("cuda:1", (10**9, 10**9))],
    ids=["on the host", "in files", "on the second device"],
)
def test_states_elsewhere_have_the_cpus_numbers_pinned(name, limits, plain, once, tmp_path):
    with pretended() as device:
        read = on(name, plain, FEW, tmp_path, *limits)
    must_be_equal(read, once(losses, plain, EVERY_DAY))
    assert not [line for line in device.uploads if "hidden_states" in line]
    assert not device.peers


def test_seconds_wait_for_no_other_stream_and_blocks_read_ahead_alone_are_pinned(plain, tmp_path):
    with pretended() as device:
        model = opened(plain, device="cuda")
        tallies = tallies_of(model, "rtn-4bit", tmp_path, device_limit=10**9)
        assert all(tally.seconds > 0 for tally in tallies.values())
    assert device.synchronized == 0
    with pretended() as device:
        model = opened(plain, device="cuda")
        assert not device.pinned
        next(model.blocks())
    weights = WeightFolder(plain)
    blocks = [weights.read(name).nbytes for name in weights.names() if ".layers." in name]
    assert 0 < sum(device.pinned.values()) <= sum(blocks)


def test_memory_that_torch_keeps_for_later_is_free_and_states_have_a_limit():
    device = torch.device("cuda")
    with pretended(capacity=2**20):
        kept = torch.zeros(2**17, device=device)
        del kept
        gc.collect()
        assert torch.cuda.mem_get_info(device)[0] == 2**19
        assert free_nbytes(device) == 2**20
    with pretended(capacity=10**6):
        assert _free_for_streams(device, 100_000, None) == 800_000
        assert _free_for_streams(device, 100_000, 1000) == 1000


def test_the_head_takes_what_the_plan_prices():
    sizes = Sizes(0, 0, 0, 0, 0, 0, 1000)
    load = Load.of(parse_schemes(["rtn-4bit,rtn-3bit,rtn-8bit"]), TextSize(64, 64, 64))
    rows_NV = normal(head_rows(1000, "cuda") // 16, 1000)
    with pretended() as device:
        streams = rows_NV.to("cuda").chunk(4)
        targets_N = torch.arange(len(streams[0])).to("cuda")
        reference = fidelity.Reference.of(streams[0], targets_N)
        for logits_NV in streams[1:]:
            reference.compare(logits_NV, targets_N)
    assert device.reserved < Footprint(sizes, load, 4, 0, "cuda").head_nbytes / 16
    assert device.reserved > Footprint(sizes, load, 4, 0, "cuda").head_nbytes / 32


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def half_quadratic(weight_RC):
    stored = parse_schemes(["hqq-4bit"])[0]._fit(weight_RC)
    return stored.codes_RC, stored.scales_RG, stored.zeros_RG


@pytest.mark.parametrize(
    ("routine", "given", "waits"),
    [
        (lambda sample_NB: [greedy_rotation(sample_NB)], normal(50, 16), 0),
        (half_quadratic, 0.1 * normal(6, 80), 0),  # small errors
        (half_quadratic, 3.0 * normal(6, 80), 0),
        (factor_backwards, torch.diag(torch.linspace(1, 2, 300)), 1),
        (factor_backwards, torch.diag(torch.linspace(-1, 2, 300)), 1),  # None: not definite
    ],
)
def test_a_routine_has_the_cpus_numbers_without_a_wait(routine, given, waits):
    expected = routine(given.clone())
    with pretended() as device:
        made_there = routine(given.to("cuda"))
        assert (device.waits.total(), made_there is None) == (waits, expected is None)
        for tensor, same in zip(made_there or (), expected or (), strict=True):
            assert torch.equal(tensor.cpu(), same)


def test_hashes_have_the_hosts_numbers_and_the_host_does_not_wait_for_them():
    scheme, weight_RC = parse_schemes(["rtn-4bit"])[0], normal(3, 4)
    with pretended() as device, LinearHashes() as hashes:
        hashes.observe(scheme, Linears({}), Quantized({"w": weight_RC.to("cuda")}, 0))
        main = [line for line in device.waits if "kept_weights" not in line]
    assert (main, hashes.of(scheme.spec)) == ([], {"0.w": sha256_of(weight_RC)})


def test_libraries_that_find_no_memory_are_out_of_memory():
    for text in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    ):
        assert is_out_of_memory(RuntimeError(text)), text
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


# What a scheme starts in one block, an eighth of a 7B's with fewer rows: kernels, and waits of the
# host. Lower them where they fall, and raise none.
MOST = {
    "atom-4bit": (2_235, 50), "awq-4bit": (1_033, 31), "bnb-int8": (246, 26), "bnb-nf4": (232, 19),
    "duquant-4bit": (52_101, 42), "gguf-q3_k": (16_806, 26), "gguf-q4_k": (23_133, 26),
    "gguf-q6_k": (7_163, 26), "gptaq-4bit": (1_786, 35), "gptq-4bit": (1_616, 35),
    "hqq-4bit": (4_520, 33), "mr-gptq": (106_914, 42), "quarot-4bit": (3_694, 54),
    "quarot-rtn-4bit": (4_672, 26), "quik-4bit": (3_871, 58), "rtn-4bit": (464, 19),
}  # fmt: skip
# Of a step of those that learn, in each group by itself.
MOST_OF_A_STEP = {
    "flatquant-4bit": (1_182, 12), "ostquant-4bit": (1_038, 20), "spinquant-4bit": (558, 20),
}  # fmt: skip
# The columns of MR-GPTQ are rounded by the plain loop: the kernel has no grids of floats.
SELDOM = {"mr-gptq", "duquant-4bit", "ostquant-4bit", "spinquant-4bit", "gguf-q4_k"}


@pytest.mark.parametrize("name", each((*MOST, *MOST_OF_A_STEP), SELDOM))
def test_a_block_or_a_step_of_learning_starts_few_kernels_and_seldom_waits(name):
    kernels, waits = {**MOST, **MOST_OF_A_STEP}[name]
    counted = count_learned(name)[1] if name in MOST_OF_A_STEP else count(name, 64, EIGHTH)
    assert counted.kernels <= kernels
    assert counted.waits <= waits


# ---------------------------------------------------------------- on the CPU, of every shape


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_scheme_works_alone_and_with_a_cache(shape, tmp_path):
    (tmp_path / "states").mkdir()
    taken = [short(name) for name in NAMES if (name, shape) not in REFUSED]
    cached = [f"{text}:kv=int4" for text in taken]
    folder = made(tmp_path / "model", shape)
    losses, tallies = run(folder, ",".join([*taken, *cached]), tmp_path / "states")
    for text in (*taken, *cached):
        spec = parse_scheme(text).spec
        assert np.isfinite(losses[spec]).all(), text
        assert not np.array_equal(losses[spec], losses["fp"]), text  # it is that scheme
        assert tallies[spec].bits > 0, text
    for text, other in filled(zip(taken, cached, strict=True)):
        plain, rounded = parse_scheme(text).spec, parse_scheme(other).spec
        assert not np.array_equal(losses[plain], losses[rounded]), text


# ---------------------------------------------------------------- a real one, by `make gpu`

# Schemes that follow gradients or walk through columns amplify the order in which a GPU adds.
NEAR, AMPLIFIED = 1e-4, 3e-2
ROUNDED = {name for name in NAMES if name.startswith(("rtn", "gguf", "bnb-nf4", "bnb-fp4", "hqq"))}


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_scheme_has_the_cpus_losses_on_a_gpu(name, plain, tmp_path):
    expected, _ = run(plain, short(name), tmp_path)
    for stream, read in on("cuda", plain, short(name), tmp_path).items():
        near = NEAR if stream == "fp" or name in ROUNDED else AMPLIFIED
        np.testing.assert_allclose(read, expected[stream], rtol=near, err_msg=stream)


@pytest.mark.gpu
def test_the_same_pass_with_its_states_on_the_host_gives_the_same_bits(plain, tmp_path):
    first, *others = (on("cuda", plain, FEW, tmp_path, limit) for limit in (10**9, 10**9, 0))
    for again in others:
        must_be_equal(again, first)


@pytest.mark.gpu
def test_the_kernel_is_taken():
    loop, note = choose([4096, 11008], torch.device("cuda"))
    assert loop != PLAIN, note
