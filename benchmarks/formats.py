"""What a format adds to an audit: passes with one scheme against the plain pass, in turns.

    python -m benchmarks.formats [--shape 15M] [--dtype bfloat16] [--windows N] [--repeats 3]
        [--schemes rtn-4bit,nvfp4,...]

A random model of a real shape, in one process on one thread. The plain pass evaluates full
precision; each other pass evaluates full precision and one scheme. What the scheme costs is the
difference of their CPU seconds, as a multiple of the plain pass. A plain pass reads and embeds,
too: running a scheme's tokens is a little less than one, and rounding is what is beyond. One
window calibrates the schemes
that need it. Losses only: KL divergence has a benchmark of its own. Fewer windows than the shape
has make quicker runs, in which rounding the weights weighs more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.clock import best_of, print_machine
from benchmarks.models import CONTEXT, SHAPES, make_model
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Scheme
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.streams import Feed
from qaudit.model.blocks import BlockModel
from qaudit.types import Window

SCHEMES = (
    "rtn-4bit,hqq-4bit,fp8,fp8:blocks=true,int8,nvfp4a16,mxfp4a16,gguf-q8_0,gguf-q4_0,bnb-nf4,"
    "nvfp4,mxfp4,mxfp4:rotate=true,quarot-rtn-4bit"
)
GOALS = {"w4a4": 1.5}
"""At most so many plain passes, by class; one for every other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="15M", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--windows", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schemes", default=SCHEMES)
    options = parser.parse_args()
    print_machine()
    torch.set_num_threads(1)
    shape = SHAPES[options.shape]
    windows = options.windows or shape.windows
    schemes = [parse_scheme(text) for text in options.schemes.split(",")]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, shape, options.dtype)
        run = passes(folder, getattr(torch, options.dtype), windows)
        runs = {scheme.short: run([scheme]) for scheme in schemes}
        run([])()  # what is loaded or made once is nobody's cost
        best = best_of({"plain": run([]), **runs}, options.repeats)
    print(f"\n{options.shape} {options.dtype}, {windows} windows of {CONTEXT}")
    print(f"plain pass {best['plain']:.2f} s; what a scheme adds, in plain passes")
    for scheme in schemes:
        ratio = best[scheme.short] / best["plain"] - 1
        goal = GOALS.get(scheme.bit_class, 1.0)
        print(f"    {scheme.short:<24}{ratio:5.2f}   at most {goal:g}")


def passes(
    folder: Path, dtype: torch.dtype, windows: int
) -> Callable[[Sequence[Scheme]], Callable[[], object]]:
    """Return what makes the pass of given schemes."""
    tokens = np.load(folder / "tokens.npy")
    cut = [Window(k, row.astype(np.int32)) for k, row in enumerate(tokens[: windows + 1])]
    feed = Feed(make_batches(cut[:1], CONTEXT), make_batches(cut[1:], CONTEXT), compared=False)
    cpu = torch.device("cpu")

    def of(schemes: Sequence[Scheme]) -> Callable[[], object]:
        def run() -> None:
            model = BlockModel(folder, WeightFolder(folder), dtype=dtype, device=cpu)
            with HiddenStates(folder / "spill", 1 << 33, cpu) as states:
                run_blocks(model, feed, schemes, states)

        return run

    return of


if __name__ == "__main__":
    main()
