"""Whether products in TF32, as a GPU makes them, change a ratio that AWQ chooses.

    python -m benchmarks.tf32

The demo's last stage (6 checkpoints and a soup) and a random model with the shape of 135M, at 4
and 3 bits. TF32 is imitated: factors are rounded to 10 bits, and products summed in float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.models import CONTEXT, SHAPES, make_model, read_tokens
from qaudit import scan
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.linears import PANELS, SMALLEST_PANEL
from qaudit.core.registry import parse_schemes
from qaudit.core.schemes.awq import Awq
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import BlockModel
from qaudit.types import Window

SCHEMES = ("awq-4bit", "awq-3bit")


def rounded(x: Tensor) -> Tensor:
    """Round float32 to the 10 bits of mantissa of TF32."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def loss(error_RC: Tensor, pairs_CC: Tensor, change: Callable[[Tensor], Tensor]) -> float:
    """Return the quadratic form over panels, with changed factors."""
    columns, total = len(pairs_CC), 0.0
    panel = max(SMALLEST_PANEL, -(-columns // PANELS))
    for start in range(0, columns, panel):
        stop = min(start + panel, columns)
        product = change(error_RC[:, :stop]) @ change(pairs_CC[:stop, start:stop])
        total += float((product * error_RC[:, start:stop]).sum())
    return total


@dataclass
class Counted:
    """What was compared: groups of linears, those with one choice, and how far losses moved."""

    groups: int = 0
    alike: int = 0
    moved: float = 0.0
    gaps: list[float] = field(default_factory=list)  # of the second lowest loss to the lowest

    def losses(
        self, awq: Awq, weight_RC: Tensor, gram_CC: Tensor, scales: Sequence[Tensor]
    ) -> list[float]:
        """Stand in for the losses of all ratios, and compare them with those in TF32."""
        gram_CC = gram_CC.to(weight_RC)
        pairs_CC = torch.triu(gram_CC) + torch.triu(gram_CC, 1)
        exact, coarse = [], []
        for scale_C in scales:
            error_RC = awq._round(weight_RC * scale_C).div_(scale_C).sub_(weight_RC)
            exact.append(loss(error_RC, pairs_CC, lambda x: x))
            coarse.append(loss(error_RC, pairs_CC, rounded))
        lowest, second = sorted(exact)[:2]
        self.groups += 1
        self.alike += exact.index(lowest) == coarse.index(min(coarse))
        moved = [abs(b / a - 1) for a, b in zip(exact, coarse, strict=True)]
        self.moved = max(self.moved, *moved)
        self.gaps.append(second / lowest - 1)
        return exact


def demo(out: Path) -> None:
    scan("demo", checkpoints=("stage2-*",), schemes=SCHEMES, evaluation_documents=4,
         arithmetic=False, out=out)  # fmt: skip


def random_135m(folder: Path) -> None:
    """Quantize four blocks: what they read differs little from block to block."""
    make_model(folder, replace(SHAPES["135M"], layers=4), "float32")
    calibration, evaluation = (
        make_batches([Window(k, row) for k, row in enumerate(rows)], CONTEXT)
        for rows in read_tokens(folder)
    )
    cpu = torch.device("cpu")
    model = BlockModel(folder, WeightFolder(folder), dtype=torch.float32, device=cpu)
    with HiddenStates(folder, 2**34, cpu) as states:
        run_blocks(model, Feed(calibration, evaluation[:1]), parse_schemes(SCHEMES), states)


def compared(run: Callable[[Path], None]) -> Counted:
    counted = Counted()
    with (
        tempfile.TemporaryDirectory() as place,
        mock.patch.object(Awq, "_own_losses", lambda awq, *rest: counted.losses(awq, *rest)),
    ):
        run(Path(place) / "out")
    return counted


def main() -> None:
    """Print a line for each model."""
    for name, run in {"demo": demo, "135M": random_135m}.items():
        counted = compared(run)
        print(
            f"{name}: {counted.alike} of {counted.groups} groups choose the same ratio; losses "
            f"move by {counted.moved:.1e} at most, the second is {min(counted.gaps):.1e} above"
        )


if __name__ == "__main__":
    main()
