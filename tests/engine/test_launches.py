"""What a scheme starts on a GPU in one block: an eighth of a 7B's, with fewer rows."""

from __future__ import annotations

import pytest

from benchmarks.launches import EIGHTH, count, count_learned
from qaudit.core.column_loops import FUSED, PLAIN

# Kernels, and waits of the host: lower them where they fall, and raise none.
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
NIGHTLY = {"mr-gptq", "duquant-4bit", "ostquant-4bit", "spinquant-4bit", "gguf-q4_k"}


def each(names):
    return [pytest.param(name, marks=pytest.mark.slow if name in NIGHTLY else ()) for name in names]


@pytest.mark.parametrize("name", each(MOST))
def test_a_block_starts_few_kernels_and_seldom_waits(name):
    kernels, waits = MOST[name]
    counted = count(name, 64, EIGHTH)
    assert counted.kernels <= kernels
    assert counted.waits <= waits


@pytest.mark.parametrize("name", each(MOST_OF_A_STEP))
def test_a_step_of_learning_starts_few_kernels_and_seldom_waits(name):
    kernels, waits = MOST_OF_A_STEP[name]
    _, step = count_learned(name)
    assert step.kernels <= kernels
    assert step.waits <= waits


def test_the_plain_loop_starts_kernels_for_every_column():
    shapes = (({"q_proj": 512}, 256),)
    plain, fused = (count("gptq-4bit", 8, shapes, loop) for loop in (PLAIN, FUSED))
    assert plain.kernels - fused.kernels > 5 * 256
