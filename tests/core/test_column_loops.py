"""Loops over GPTQ's columns: what a plan proves before it takes one."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from qaudit.core import column_loops
from qaudit.core.column_loops import FUSED, LOOPS, PLAIN, choose
from qaudit.core.gptq_solver import quantize_block
from qaudit.core.registry import parse_scheme
from qaudit.planning.machine import choose_column_loop
from qaudit.planning.sizes import Sizes
from tests.support.pretended_device import pretended
from tests.support.schemes import example

CPU = torch.device("cpu")


@contextmanager
def loops(function):
    with mock.patch.object(column_loops, "LOOPS", {FUSED: function}):
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
    ("function", "loop", "why"),
    [
        (quantize_block, FUSED, "GPTQ's columns are rounded by the fused kernel: the plain loop's"),
        (wrong_at_one_weight, PLAIN, "other codes in columns 0 to 64 of 64"),
        (without_the_pull, PLAIN, "other codes in columns 0 to 64 of 64"),
        (failing, PLAIN, "no kernel image is available for execution on the device"),
    ],
)
def test_a_gpu_takes_what_gives_the_plain_loops_codes_and_else_the_plain_loop(function, loop, why):
    with mock.patch.object(column_loops, "obstacle", lambda weight: None), loops(function):
        chosen, note = choose([64, 130], CPU)
    assert chosen == loop
    assert why in note


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
    with pretended():
        loop, note = choose_column_loop("cuda", [gptq], sizes)
    assert (loop, "not by the fused kernel" in note) == (PLAIN, True)  # no Triton here


@pytest.mark.parametrize("name", ["gptq-4bit", "gptaq-4bit", "quarot-4bit", "atom-4bit:keep=8"])
def test_linears_name_the_loop_that_rounds_them(name):
    calls = []

    def counted(*block):
        calls.append(1)
        quantize_block(*block)

    linears = example()
    with mock.patch("qaudit.core.schemes.gptq.LOOPS", {**LOOPS, FUSED: counted}):
        expected = parse_scheme(name).quantize(linears)
        assert not calls
        quantized = parse_scheme(name).quantize(replace(linears, column_loop=FUSED))
    assert calls
    for linear, weight in expected.weights.items():
        assert torch.equal(quantized.weights[linear], weight)


def test_without_triton_the_plain_loop_runs_and_a_note_says_so(monkeypatch):
    monkeypatch.setattr("qaudit.core.column_loops.find_spec", lambda name: None)
    plain, fused = (parse_scheme(f"gptq-4bit{more}") for more in ("", ":fused=true"))
    assert fused.spec != plain.spec  # results of its own
    expected, found = plain.quantize(example()), fused.quantize(example())
    assert set(found.notes) - set(expected.notes) == {
        "rounded by the plain loop, not the fused kernel: triton is not installed"
    }
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight)


def test_double_precision_and_weights_on_the_cpu_are_left_to_the_plain_loop(monkeypatch):
    monkeypatch.setattr("qaudit.core.column_loops.find_spec", lambda name: name)
    monkeypatch.setattr("qaudit.core.column_loops._is_interpreted", lambda: True)
    assert column_loops.obstacle(torch.zeros(2)) is None
    assert "float64" in column_loops.obstacle(torch.zeros(2, dtype=torch.float64))
    monkeypatch.setattr("qaudit.core.column_loops._is_interpreted", lambda: False)
    assert column_loops.obstacle(torch.zeros(2)) == "there is no CUDA device"
