"""What a scheme starts on a GPU in one block: an eighth of a 7B's, with fewer rows."""

from __future__ import annotations

import pytest

from benchmarks.launches import Launches, count
from qaudit.core.column_loops import FUSED, PLAIN

EIGHTH = (
    ({"q_proj": 512, "k_proj": 512, "v_proj": 512}, 512),
    ({"o_proj": 512}, 512),
    ({"gate_proj": 1376, "up_proj": 1376}, 512),
    ({"down_proj": 512}, 1376),
)
# Kernels, and waits of the host: lower them where they fall, and raise none.
MOST = {
    "awq-4bit": (7_789, 37), "gptaq-4bit": (1_792, 54), "gptq-4bit": (1_622, 54),
    "hqq-4bit": (4_534, 33), "quik-4bit": (3_910, 77),
}  # fmt: skip


@pytest.mark.parametrize("name", MOST)
def test_a_block_starts_few_kernels_and_seldom_waits(name):
    kernels, waits = MOST[name]
    counted = count(name, 64, EIGHTH)
    assert counted.kernels <= kernels
    assert counted.waits <= waits


def test_the_plain_loop_starts_kernels_for_every_column():
    shapes = (({"q_proj": 512}, 256),)
    plain, fused = (count("gptq-4bit", 8, shapes, loop) for loop in (PLAIN, FUSED))
    assert plain.kernels - fused.kernels > 5 * 256


def test_views_start_nothing():
    import torch

    with Launches() as launches:
        torch.ones(4, 4).T[1:].reshape(-1, 4)
    assert launches.kernels.total() == 1  # what fills it with ones
