"""What KL divergence and agreement cost: whole audits with them and without, in turns.

    python -m benchmarks.fidelity [--shapes 15M,135M] [--dtypes bfloat16] [--windows N]
        [--repeats 3]

Two audits of random models of real shapes: fp, gptq-4bit, gptq-3bit and rtn-3/4/8bit, as
`benchmarks.audit` runs them, and fp with the three rtn schemes, which calibrate nothing, so that
the head is as much of an audit as it can be. Each run is a process of its own on one thread; each
figure is the best of `--repeats` rounds. The added share is CPU seconds with over without, less 1.
Fewer windows than a shape has make quicker runs, in which reading the model weighs more.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.audit import SCHEMES, Seconds, keep_best, ours
from benchmarks.clock import print_machine, run_apart
from benchmarks.models import SHAPES, Shape, make_model

GOAL = {("135M", "audit"): "<= 6 %"}
AUDITS = {"audit": SCHEMES, "rtn": SCHEMES[2:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="15M,135M")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--windows", type=int, help="of calibration and of evaluation")
    parser.add_argument("--audits", default=",".join(AUDITS))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print_machine()
    for name in options.shapes.split(","):
        for dtype in options.dtypes.split(","):
            shape = replace(SHAPES[name], windows=options.windows or SHAPES[name].windows)
            print(
                f"\n{name} {dtype}, {shape.windows} windows of 512 for calibration and evaluation"
            )
            for audit in options.audits.split(","):
                measure(audit, name, shape, dtype, options.repeats)


def measure(audit: str, name: str, shape: Shape, dtype: str, repeats: int) -> None:
    """Print the added share of one audit, and the CPU seconds behind it."""
    best: Seconds = {}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, shape, dtype)
        for _ in range(repeats):
            for what in ("audit", "without-kl"):
                schemes = ours(AUDITS[audit], shape)
                result = run_apart(sys.executable, "run_qaudit", folder, what, schemes)
                keep_best(best, what, result["seconds"])
    added = best["audit"] / best["without-kl"] - 1
    print(
        f"    {audit:<6}{added:+7.1%}   {GOAL.get((name, audit), ''):<8}"
        f"with {best['audit']:.1f} s, without {best['without-kl']:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
