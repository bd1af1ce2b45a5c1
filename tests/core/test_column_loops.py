"""Loops over GPTQ's columns: what a plan proves before it takes one, and a graph's recording."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from qaudit.core import column_loops, gptq_graph
from qaudit.core.column_loops import FUSED, GRAPH, LOOPS, PLAIN, choose
from qaudit.core.gptq_block import Pull, quantize_block
from qaudit.core.grid import fit
from qaudit.core.registry import parse_scheme
from qaudit.planning.devices import choose_column_loop
from qaudit.planning.sizes import Sizes
from tests.support.pretended_device import pretended
from tests.support.schemes import example

CPU = torch.device("cpu")


class Tape(TorchFunctionMode):
    """What was called, to be called once more on what the same tensors hold by then."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            if isinstance(out, torch.Tensor) and again is not out:
                out.copy_(again)


@contextmanager
def graphs(device):
    """Let CUDA graphs record calls; nothing may wait or be uploaded meanwhile."""

    @contextmanager
    def capture(tape, capture_error_mode):
        assert capture_error_mode == "thread_local"
        before = device.waits.total() + device.uploads.total()
        with tape:
            yield
        assert device.waits.total() + device.uploads.total() == before

    gptq_graph._recorded.cache_clear()
    with (
        mock.patch.object(torch.cuda, "CUDAGraph", Tape),
        mock.patch.object(torch.cuda, "graph", capture),
        mock.patch.object(torch.cuda, "device", lambda device: nullcontext()),
        # The warm-up is on a side stream, where the pretended device only copies.
        mock.patch.object(torch.cuda, "stream", lambda stream: nullcontext()),
    ):
        yield
    gptq_graph._recorded.cache_clear()


def blocks(count, columns=40, rows=7, group=16, device="cpu"):
    for seed in range(count):
        random = torch.Generator().manual_seed(seed)
        weight_BR, target_BR = (torch.randn(columns, rows, generator=random) for _ in range(2))
        lower_BB = torch.randn(columns, columns, generator=random).tril(-1) / 9
        pulled_BB = torch.randn(columns, columns, generator=random).tril(-1) / 9
        lower_BB += torch.eye(columns)
        starts = range(0, columns, group)
        grids = [fit(target_BR[a : a + group], 4, symmetric=True, dim=0) for a in starts]
        grid_PR = grids[0].joined(grids).each(lambda t: t.to(device))
        some = [t.to(device) for t in (weight_BR, target_BR, lower_BB)]
        pull = Pull(pulled_BB.to(device), torch.zeros(columns, rows, device=device))
        yield (
            some,
            grid_PR,
            [(column + seed) // group % len(starts) for column in range(columns)],
            pull,
        )


@pytest.mark.parametrize("pulls", [False, True], ids=["alone", "pulling"])
def test_one_recording_rounds_every_block_of_its_shape(pulls):
    expected = []
    for some, grid_PR, grid_of_B, pull in blocks(3):
        quantize_block(*some, grid_PR, grid_of_B, pull if pulls else None)
        expected.append([*some, pull.target_BR])
    with pretended() as device, graphs(device):
        replayed = []
        for some, grid_PR, grid_of_B, pull in blocks(3, device="cuda"):
            LOOPS[GRAPH](*some, grid_PR, grid_of_B, pull if pulls else None)
            replayed.append([t.cpu() for t in (*some, pull.target_BR)])
        assert gptq_graph._recorded.cache_info().misses == 1
    for ours, theirs in zip(replayed, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_libraries_are_warmed_up_on_a_side_stream_before_the_recording():
    steps, streams = [], ["main"]

    class Stream:
        def __init__(self, device, name="side"):
            self.name = name

        def wait_stream(self, stream):
            steps.append(f"{self.name} waits for {stream.name}")

    @contextmanager
    def inside(name):
        streams.append(name)
        yield
        streams.pop()

    cuda = {
        "Stream": Stream,
        "CUDAGraph": object,
        "device": lambda device: nullcontext(),
        "current_stream": lambda device: Stream(device, "main"),
        "stream": lambda stream: inside(stream.name),
        "graph": lambda graph, capture_error_mode: inside("recording"),
    }
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(gptq_graph, "quantize_block", lambda *_: steps.append(streams[-1])),
    ):
        gptq_graph._Recording(2, 3, pulls=False, device=CPU)
    assert steps == ["side waits for main", "side", "main waits for side", "recording"]


def test_a_gpu_takes_what_gives_the_plain_loops_codes():
    with pretended() as device, graphs(device):
        assert choose([64, 130], torch.device("cuda"))[0] == GRAPH  # no Triton here
    with mock.patch.object(column_loops, "obstacle", lambda weight: None), loops(quantize_block):
        assert choose([64, 130], CPU) == (
            FUSED,
            "GPTQ's columns are rounded by the fused kernel: the plain loop's codes",
        )


@contextmanager
def loops(function):
    with mock.patch.object(column_loops, "LOOPS", {FUSED: function, GRAPH: function}):
        yield


def wrong_at_one_weight(weight_BR, target_BR, *others):
    quantize_block(weight_BR, target_BR, *others)
    target_BR[-1, 3] += others[1].scale[0, 3]


def without_the_pull(weight_BR, target_BR, lower_BB, grid_PR, grid_of_B, pull=None):
    quantize_block(weight_BR, target_BR, lower_BB, grid_PR, grid_of_B)
    if pull is not None:
        pull.target_BR.copy_(target_BR)


def failing(*_):
    raise RuntimeError("no kernel image is available\nfor execution on the device")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (wrong_at_one_weight, "other codes in columns 0 to 64 of 64"),
        (without_the_pull, "other codes in columns 0 to 64 of 64"),
        (failing, "no kernel image is available for execution on the device"),
    ],
)
def test_anything_else_leaves_the_plain_loop_and_a_note(function, why):
    with mock.patch.object(column_loops, "obstacle", lambda weight: None), loops(function):
        loop, note = choose([64], CPU)
    assert loop == PLAIN
    assert note.count(why) == 2


def test_a_tie_may_go_either_way():
    def other_at_ties(weight_BR, target_BR, lower_BB, grid_PR, grid_of_B, pull=None):
        nudged = (1 + 1e-7) * target_BR
        quantize_block(weight_BR, nudged, lower_BB, grid_PR, grid_of_B, pull)
        target_BR.copy_(nudged)

    assert column_loops._difference(other_at_ties, [128], CPU) is None


def test_the_plan_chooses_for_schemes_that_round_columns_on_a_gpu_alone():
    sizes = Sizes(1, 1, 1, 1, hidden=64, widest=130, vocabulary=9)
    gptq, awq = (parse_scheme(name) for name in ("gptq-4bit", "awq-4bit"))
    assert choose_column_loop("cpu", [gptq], sizes) == (PLAIN, "")
    assert choose_column_loop("cuda", [awq], sizes) == (PLAIN, "")
    assert "without a GPU" in choose_column_loop("cuda", [gptq], sizes)[1]
    with pretended() as device, graphs(device):
        assert choose_column_loop("cuda", [gptq], sizes)[0] == GRAPH


@pytest.mark.parametrize("name", ["gptq-4bit", "gptaq-4bit", "quarot-4bit", "atom-4bit:keep=8"])
def test_linears_name_the_loop_that_rounds_them(name):
    calls = []

    def counted(*block):
        calls.append(1)
        quantize_block(*block)

    linears = example()
    with mock.patch("qaudit.core.schemes.gptq.LOOPS", {**LOOPS, GRAPH: counted}):
        expected = parse_scheme(name).quantize(linears)
        assert not calls
        quantized = parse_scheme(name).quantize(replace(linears, column_loop=GRAPH))
    assert calls
    for linear, weight in expected.weights.items():
        assert torch.equal(quantized.weights[linear], weight)
