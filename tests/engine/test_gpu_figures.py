"""What `make gpu` measures: how a trace is read, and a pass on the pretended device."""

from __future__ import annotations

import torch

from benchmarks.gpu import Memory, Overlap, lines, memory
from benchmarks.models import Shape, make_model
from tests.support.pretended_device import pretended

TINY = Shape(32, 64, 2, 2, 2, 128, group=32, windows=2)


def event(category, name, start, length):
    return {"cat": category, "name": name, "ts": start, "dur": length}


def test_copies_count_where_a_kernel_runs_beside_them():
    trace = [
        event("kernel", "gemm", 0, 10),
        event("kernel", "on another stream", 5, 10),  # both together: 0 to 15
        event("kernel", "late", 40, 5),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 12, 6),  # 3 of 6
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 38, 4),  # 2 of 4
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 9),
        event("cpu_op", "aten::mm", 0, 100),
        {"name": "process_name"},
    ]
    assert Overlap.of(trace) == Overlap(copying=10, beside=5)


def test_figures_are_lines():
    text = "\n".join(lines(Memory(200, 100), Overlap(2e6, 1.5e6), 12.34))
    assert "0.50 of the plan" in text
    assert "copies: 2.00 s, 75% of it beside a kernel" in text
    assert "a pass: 12.3 s" in text
    assert "none in the trace" in "\n".join(lines(Memory(1, 1), Overlap.of([]), 1))


def test_a_pass_is_planned_and_its_memory_read(tmp_path):
    make_model(tmp_path, TINY, "bfloat16")
    with pretended():
        found = memory(tmp_path, torch.device("cuda"), TINY.windows)
    assert found.planned_nbytes > 0
    assert found.held_nbytes > 0
