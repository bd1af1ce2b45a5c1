"""What KL divergence and agreement cost: whole audits with them and without, in turns.

    python -m benchmarks.fidelity [--shapes 15M,135M] [--dtypes bfloat16] [--repeats 3]

Two audits of random models of real shapes: fp, gptq-4bit, gptq-3bit and rtn-3/4/8bit, as
`benchmarks.audit` runs them, and fp with the three rtn schemes, which calibrate nothing, so that
the head is as much of an audit as it can be. Each run is a process of its own on one thread; each
figure is the best of `--repeats` rounds. The added share is CPU seconds with over without, less 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.audit import SCHEMES, Seconds, keep_best, ours
from benchmarks.clock import print_machine, run_apart
from benchmarks.models import SHAPES, make_model

GOAL = {("135M", "audit"): "<= 6 %"}
AUDITS = {"audit": SCHEMES, "rtn alone": SCHEMES[2:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print_machine()
    for name in options.shapes.split(","):
        for dtype in options.dtypes.split(","):
            measure(name, dtype, options.repeats)


def measure(name: str, dtype: str, repeats: int) -> None:
    """Print the added share of one shape in one dtype, and the CPU seconds behind it."""
    shape = SHAPES[name]
    best: dict[str, Seconds] = {audit: {} for audit in AUDITS}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, shape, dtype)
        for _ in range(repeats):
            for audit, schemes in AUDITS.items():
                for what in ("audit", "without-kl"):
                    result = run_apart(
                        sys.executable, "run_qaudit", folder, what, ours(schemes, shape)
                    )
                    keep_best(best[audit], what, result["seconds"])
    print(f"\n{name} {dtype}, {shape.windows} windows of 512 for calibration and for evaluation")
    for audit, seconds in best.items():
        added = seconds["audit"] / seconds["without-kl"] - 1
        print(
            f"    {audit:<10}{added:+7.1%}   {GOAL.get((name, audit), ''):<8}"
            f"with {seconds['audit']:.1f} s, without {seconds['without-kl']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
