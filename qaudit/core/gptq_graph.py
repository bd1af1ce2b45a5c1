"""The plain column loop as a CUDA graph: its kernels are started together, by one call.

For a GPU without Triton. Every block of 128 columns takes the same kernels with the same shapes,
and no step of it waits for a number: `tests/core/test_column_loops.py` replays a recording on other
numbers. So one recording for each shape serves all blocks. It is never used before a plan on that
very device proved it (`qaudit/core/column_loops.py`). It was not captured on a device yet.

Grids are laid out column by column, so that which column is rounded on which is no part of the
recording.

Shapes: B columns of the block, R rows, P grids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING

from qaudit.core.gptq_block import Pull, quantize_block
from qaudit.core.grid import Grid

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHAPES = 16  # recordings that are kept; a model has one or two for each group of linears


def quantize_block_replayed(
    weight_BR: Tensor,
    target_BR: Tensor,
    lower_BB: Tensor,
    grid_PR: Grid,
    grid_of_B: Sequence[int],
    pull: Pull | None = None,
) -> None:
    """Do what `quantize_block` does by one recording: same arguments, in place as there."""
    size, rows = weight_BR.shape
    recorded = _recorded(size, rows, pull is not None, weight_BR.device)
    grid_BR = grid_PR.each(itemgetter(list(grid_of_B)))
    given = [weight_BR, target_BR, lower_BB, grid_BR.scale, grid_BR.low, grid_BR.high]
    if pull is not None:
        given.append(pull.lower_BB)
    for buffer, tensor in zip(recorded.given, given, strict=False):
        buffer.copy_(tensor)
    recorded.graph.replay()
    weight_BR.copy_(recorded.given[0])
    target_BR.copy_(recorded.given[1])
    if pull is not None:
        pull.target_BR.copy_(recorded.pulled_BR)


@lru_cache(maxsize=SHAPES)
def _recorded(size: int, rows: int, pulls: bool, device: torch.device) -> _Recording:
    return _Recording(size, rows, pulls=pulls, device=device)


class _Recording:
    """A graph of the loop over one block, and the tensors that it reads and writes."""

    def __init__(self, size: int, rows: int, *, pulls: bool, device: torch.device) -> None:
        import torch

        shapes = [(size, rows)] * 2 + [(size, size)] + [(size, rows)] * 3 + [(size, size)]
        self.given = [torch.ones(shape, device=device) for shape in shapes]
        self.pulled_BR = torch.ones((size, rows) if pulls else (0,), device=device)
        pull = Pull(self.given[6], self.pulled_BR) if pulls else None
        weight_BR, target_BR, lower_BB, *grid = self.given[:6]

        def run() -> None:
            quantize_block(weight_BR, target_BR, lower_BB, Grid(*grid), range(size), pull)

        with torch.cuda.device(device):
            aside = torch.cuda.Stream(device)
            aside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(aside):  # libraries allocate what they need before recording
                run()
            torch.cuda.current_stream(device).wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            # Other threads go on: one of them pins what is read ahead.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                run()
