"""What a format adds to an audit: the CPU seconds of its stream, in plain passes.

    python -m benchmarks.formats [--shape 15M] [--dtype bfloat16] [--windows 4,16] [--repeats 3]
        [--schemes rtn-4bit,nvfp4,...]

A random model of a real shape, in one process on one thread. All schemes that no text calibrates go
through one pass beside full precision, block by block in turns, so that what else runs on the
machine slows them alike. A scheme's own share is what it adds: rounding weights and activations,
its tokens through the blocks, and its losses. The rest is the plain pass: reading, embedding, and
full precision. A scheme that calibrates has a pass of its own, and what this takes beyond the plain
one is its cost, too; one window calibrates it. Losses only: KL divergence has a benchmark of its
own.

Rounding weights costs the same however many windows there are. With two numbers of windows that
fixed part and the cost of a window are told apart, for the plain pass too, and the numbers of
windows at which a goal is met follow.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.clock import print_machine
from benchmarks.models import CONTEXT, SHAPES, make_model
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Calibration, Scheme
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import BlockModel
from qaudit.types import Window

SCHEMES = (
    "rtn-4bit,hqq-4bit,fp8,fp8:blocks=true,int8,nvfp4a16,mxfp4a16,gguf-q8_0,gguf-q4_0,bnb-nf4,"
    "nvfp4,mxfp4,mxfp4:rotate=true,quarot-rtn-4bit"
)
GOALS = {"w4a4": 1.5}
"""At most so many plain passes, by class; one for every other."""
PLAIN = "plain"
Seconds = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="15M", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--windows", default="4,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schemes", default=SCHEMES)
    options = parser.parse_args()
    print_machine()
    torch.set_num_threads(1)
    schemes = [parse_scheme(text) for text in options.schemes.split(",")]
    counts = [int(text) for text in options.windows.split(",")]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, SHAPES[options.shape], options.dtype)
        runs = {n: passes(folder, getattr(torch, options.dtype), n) for n in counts}
        runs[counts[0]]([])  # what is loaded or made once is nobody's cost
        best: dict[int, Seconds] = {n: {} for n in counts}
        for _ in range(options.repeats):
            for n in counts:
                for name, seconds in measured(runs[n], schemes).items():
                    best[n][name] = min(seconds, best[n].get(name, math.inf))
    print(f"\n{options.shape} {options.dtype}, windows of {CONTEXT}, best of {options.repeats}")
    for n in counts:
        print(f"plain pass of {n} windows: {best[n][PLAIN]:.2f} s")
    print(report(best, schemes))


def passes(folder: Path, dtype: torch.dtype, windows: int) -> Callable[[Sequence[Scheme]], Seconds]:
    """Return what runs a pass of given schemes, and returns the CPU seconds of each."""
    tokens = np.load(folder / "tokens.npy")
    cut = [Window(k, row.astype(np.int32)) for k, row in enumerate(tokens[: windows + 1])]
    feed = Feed(make_batches(cut[:1], CONTEXT), make_batches(cut[1:], CONTEXT), compared=False)
    cpu = torch.device("cpu")

    def run(schemes: Sequence[Scheme]) -> Seconds:
        began = time.process_time()
        model = BlockModel(folder, WeightFolder(folder), dtype=dtype, device=cpu)
        with (
            HiddenStates(folder / "spill", 1 << 33, cpu) as states,
            patch.object(time, "perf_counter", time.thread_time),  # by which streams are timed
        ):
            tallies = run_blocks(model, feed, schemes, states)
        spent = time.process_time() - began
        own = {scheme.spec: tallies[scheme.spec].seconds for scheme in schemes}
        return own | {PLAIN: spent - sum(own.values())}

    return run


def measured(run: Callable[[Sequence[Scheme]], Seconds], schemes: Sequence[Scheme]) -> Seconds:
    """Return the seconds of the plain pass and of each scheme, once."""
    free = [scheme for scheme in schemes if scheme.calibration is Calibration.NONE]
    seconds = run(free)
    for scheme in schemes:
        if scheme not in free:
            alone = run([scheme])
            seconds[scheme.spec] = alone[scheme.spec] + alone[PLAIN] - seconds[PLAIN]
    return seconds


def report(best: Mapping[int, Seconds], schemes: Sequence[Scheme]) -> str:
    """Return the table: ratios, the parts of a cost, and from where on a goal is met."""
    counts = sorted(best)
    heads = "".join(f"{n:>8}" for n in counts)
    lines = [
        f"{'added, in plain passes, windows:':<32}{heads}   goal   fixed s  s a window     met at"
    ]
    plain = parts(best, PLAIN)
    for scheme in schemes:
        goal = GOALS.get(scheme.bit_class, 1.0)
        ratios = "".join(f"{best[n][scheme.spec] / best[n][PLAIN]:8.2f}" for n in counts)
        own = parts(best, scheme.spec)
        columns = f"{own[0]:10.2f}{own[1]:12.4f}{met_at(own, plain, goal):>11}"
        lines.append(f"    {scheme.short:<28}{ratios}{goal:7g}{columns}")
    return "\n".join(
        [*lines, f"    {PLAIN:<28}{'':{8 * len(counts) + 7}}{plain[0]:10.2f}{plain[1]:12.4f}"]
    )


def parts(best: Mapping[int, Seconds], name: str) -> tuple[float, float]:
    """Return fixed seconds, and those of a window, by the fewest and the most windows."""
    few, many = min(best), max(best)
    if few == many:
        return math.nan, math.nan
    each = (best[many][name] - best[few][name]) / (many - few)
    return best[few][name] - few * each, each


def met_at(own: tuple[float, float], plain: tuple[float, float], goal: float) -> str:
    """Return the numbers of windows with which a scheme adds at most `goal` plain passes."""
    fixed, each = own[0] - goal * plain[0], own[1] - goal * plain[1]
    if math.isnan(fixed):
        return "-"
    if max(fixed, each) <= 0:
        return "all"
    if each < 0:
        return f"from {math.ceil(fixed / -each)}"
    return "none" if fixed + each > 0 else f"up to {math.floor(fixed / -each)}"


if __name__ == "__main__":
    main()
