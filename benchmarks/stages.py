"""Where the time of an audit goes, stage by stage, and what KL divergence adds to a stream.

    python -m benchmarks.stages [--shapes 15M,135M] [--dtypes bfloat16] [--windows 4] [--repeats 1]

fp, gptq-4bit, gptq-3bit and rtn-3/4/8bit on a random model of a real shape, with KL divergence and
without, in turns, each in a process of its own on one thread. A stage's seconds are of the thread
that runs it, without those of stages inside it; each figure is the least of `--repeats` runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import local
from typing import Any
from unittest import mock

from benchmarks.audit import SCHEMES, Seconds, keep_best, ours
from benchmarks.clock import print_machine, run_apart
from benchmarks.models import SHAPES, Shape, make_model

STREAMS = 1 + len(SCHEMES)
EVALUATING = ("forward", "head", "losses")  # of every stream; comparing comes on top


class Stages:
    """Seconds by stage, each without those of stages inside it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._threads = local()

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self._threads.inside = getattr(self._threads, "inside", 0.0), 0.0
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.thread_time() - began
                self.seconds[stage] += whole - self._threads.inside
                self._threads.inside = outer + whole

        return run


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """Time the engine's stages for a `with` body."""
    from qaudit.core import fidelity
    from qaudit.core.linears import InputsAccumulator
    from qaudit.core.schemes import gptq, nearest
    from qaudit.engine import read_out
    from qaudit.model.blocks import Block, BlockModel

    stages = Stages()
    places: list[tuple[str, Any, str]] = [
        ("reading", BlockModel, "_read"),
        ("preparing blocks", BlockModel, "_make"),
        ("forward", Block, "forward"),
        ("Gram matrices", InputsAccumulator, "add"),
        ("Gram matrices", InputsAccumulator, "result"),
        ("factorization", gptq, "factorize"),
        ("solving", gptq, "solve"),
        ("the rest of gptq", gptq.Gptq, "quantize"),
        ("rtn", nearest.RoundToNearest, "quantize"),
        ("head", BlockModel, "logits"),
        ("losses", read_out, "losses"),
        ("losses", fidelity.Reference, "of"),
        ("losses, compared", fidelity.Reference, "compare"),
    ]
    with ExitStack() as stack:
        for stage, owner, name in places:
            timed = stages.timed(stage, getattr(owner, name))
            bound = staticmethod(timed) if owner is fidelity.Reference and name == "of" else timed
            stack.enter_context(mock.patch.object(owner, name, bound))
        yield stages.seconds


def run() -> None:
    """Run one audit here, and print its seconds by stage."""
    from benchmarks import run_qaudit

    began = time.process_time()
    with watched() as seconds:
        run_qaudit.main()
    seconds["the rest"] = time.process_time() - began - sum(seconds.values())
    print(json.dumps(seconds))


def measure(name: str, shape: Shape, dtype: str, repeats: int) -> None:
    without, seconds = Seconds(), Seconds()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, shape, dtype)
        for _ in range(repeats):
            for what, best in (("without-kl", without), ("audit", seconds)):
                schemes = ours(SCHEMES, shape)
                taken = run_apart(sys.executable, "stages", "--run", folder, what, schemes)
                for stage in taken:
                    keep_best(best, stage, taken[stage])
    whole = sum(seconds.values())
    print(f"\n{name} {dtype}, {shape.windows} windows of 512, calibration and evaluation each")
    for stage, taken in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"    {stage:<18}{taken:8.2f} s{taken / whole:8.1%}")
    compared = seconds["losses, compared"] + seconds["losses"] - without["losses"]
    stream = sum(without[stage] for stage in EVALUATING) / STREAMS
    losses = without["losses"] / STREAMS
    print(
        f"    KL adds {compared / len(SCHEMES) / stream:.1%} to a stream of {stream:.2f} s, ",
        end="",
    )
    print(f"of which losses are {losses:.2f} s", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        del sys.argv[1]
        run()
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="15M,135M")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--windows", type=int, default=4, help="of calibration and of evaluation")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    print_machine()
    for name in options.shapes.split(","):
        for dtype in options.dtypes.split(","):
            shape = replace(SHAPES[name], windows=options.windows)
            measure(name, shape, dtype, options.repeats)


if __name__ == "__main__":
    main()
