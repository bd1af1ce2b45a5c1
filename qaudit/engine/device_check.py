"""One block audited on a GPU and on the CPU: whether the GPU has its losses, and how fast it is."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.core.scheme import Calibration
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import BlockModel
from qaudit.settings import DEFAULT_SCHEMES
from qaudit.types import Window

SCHEMES = tuple(name for name in DEFAULT_SCHEMES if name.endswith("-4bit"))
CLOSE = 1e-4  # of a loss in float32: the order of sums differs
CHAOS = 2e-2  # of schemes that calibrate, which amplify that order
SIDE = 4096  # of the matrices whose product is timed
SEVEN_B, TOKENS = 7e9, 131_072


@dataclass(frozen=True)
class DeviceCheck:
    """How far losses are from the CPU's, and the rate of a product of matrices."""

    apart: dict[str, float]  # relative, by scheme
    rate: float  # FLOP per second

    @property
    def wrong(self) -> tuple[str, ...]:
        return tuple(
            name
            for name, apart in self.apart.items()
            if not apart <= (CHAOS if _calibrates(name) else CLOSE)
        )

    @property
    def seconds_of_7b(self) -> float:
        """Return what the forward passes of a default audit of a 7B model take at this rate."""
        return (1 + len(DEFAULT_SCHEMES)) * TOKENS * 2 * SEVEN_B / self.rate


def _calibrates(stream: str) -> bool:
    return stream in SCHEMES and parse_scheme(stream).calibration is not Calibration.NONE


def check_device(device: torch.device, dtype: torch.dtype) -> DeviceCheck:
    with tempfile.TemporaryDirectory(prefix="qaudit-") as temporary:
        folder = _make_model(Path(temporary))
        there, here = (_losses(folder, place) for place in (device, torch.device("cpu")))
    apart = {name: abs(there[name] / here[name] - 1) for name in here}
    return DeviceCheck(apart, _rate(device, dtype))


def _make_model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _losses(folder: Path, device: torch.device) -> dict[str, float]:
    draw = np.random.default_rng(0)
    rows = draw.integers(3, 512, (8, 64), dtype=np.int32)
    calibration, evaluation = (
        make_batches([Window(k, row) for k, row in enumerate(some)], 64)
        for some in (rows[:4], rows[4:])
    )
    model = BlockModel(folder, WeightFolder(folder), dtype=torch.float32, device=device)
    with HiddenStates(folder / "spill", 2**30, device, 2**28) as states:
        tallies = run_blocks(model, Feed(calibration, evaluation), parse_schemes(SCHEMES), states)
    names = ("fp", *SCHEMES)
    return {
        name: float(torch.cat([nll[:, 1:].flatten() for nll in tally.nll]).double().mean())
        for name, tally in zip(names, tallies.values(), strict=True)
    }


def _rate(device: torch.device, dtype: torch.dtype, side: int = SIDE) -> float:
    a = torch.ones(side, side, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(4):  # the first one warms up
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        a @ a
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * side**3 / best
