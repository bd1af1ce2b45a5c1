"""Whole audits against the sum of runs they replace, on random models of real shapes.

    python -m benchmarks.audit [--shapes 15M,135M] [--dtypes bfloat16,float32] [--windows N]
        [--repeats 2]

Both read the same tokens in the same dtype. Six ratios:

    quantize   one gptq-4bit: llm-compressor's `oneshot`, without loading the model or evaluating
               it, over ours with no evaluation tokens, reading the model included
    audit      fp, gptq-4bit, gptq-3bit, rtn-3/4/8bit: the sum of one plain evaluation by
               transformers and, for each scheme, llm-compressor's quantization and the evaluation
               of what it leaves in memory, over our one pass, everything included
    without    the same sum over our pass that compares no scheme with full precision, though it
               then measures less
    share      `audit` over `without`: what KL divergence and agreement leave of the ratio
    marginal   one further rtn scheme in our pass, over one plain evaluation by transformers
    bound      how often our audit would fit a peer's sum if it did nothing but six evaluations:
               sum / (6 plain evaluations); how far below it `audit` lies is our own overhead,
               how far above, what a lighter head saves

The peer runs at the batch sizes that suit it best, calibration and evaluation each (a first
round tries `--batches`), on one thread like us. Its loading and saving are left out; ours is
counted. All processes take turns; each figure is the best of `--repeats` rounds.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.clock import PEER_PYTHON, print_machine, run_apart
from benchmarks.models import SHAPES, Shape, make_model

SCHEMES = ("gptq-4bit", "gptq-3bit", "rtn-3bit", "rtn-4bit", "rtn-8bit")
GOALS = {
    ("quantize", "float32"): ">= 2",
    ("quantize", "bfloat16"): ">= 3.5",
    ("audit", "bfloat16"): ">= 2 (15M)",
    ("share", "float32"): ">= 0.9",
    ("share", "bfloat16"): ">= 0.9",
    ("marginal", "float32"): "<= 1",
    ("marginal", "bfloat16"): "<= 1",
}
Seconds = dict[str, float]


def keep_best(best: Seconds, name: str, seconds: float) -> None:
    best[name] = min(seconds, best.get(name, float("inf")))


def ours(names: tuple[str, ...], shape: Shape) -> str:
    return ",".join(f"{name}:group={shape.group}" for name in names)


def run_peer(best: Seconds, folder: Path, scheme: str, shape: Shape, batches: list[int]) -> None:
    result = run_apart(PEER_PYTHON, "run_llmcompressor", folder, scheme, shape.group, *batches)
    keep_best(best, f"peer {scheme}", result["quantize"])
    keep_best(best, f"peer {scheme} batch {batches[0]}", result["quantize"])
    for batch in batches:
        keep_best(best, f"peer evaluate {scheme}", result[f"evaluate {batch}"])
        keep_best(best, f"peer evaluate batch {batch}", result[f"evaluate {batch}"])


def run_round(best: Seconds, folder: Path, shape: Shape, batches: tuple[int, int]) -> None:
    """Let every process run once."""
    calibrate, evaluate = batches
    python = sys.executable
    runs = {
        "quantize": ("quantize-only", ours(SCHEMES[:1], shape)),
        "audit": ("audit", ours(SCHEMES, shape)),
        "without": ("without-kl", ours(SCHEMES, shape)),
        "one rtn": ("audit", ours(SCHEMES[2:3], shape)),
        "three rtn": ("audit", ours(SCHEMES[2:], shape)),
    }
    for name, (what, schemes) in runs.items():
        keep_best(best, name, run_apart(python, "run_qaudit", folder, what, schemes)["seconds"])
        result = run_apart(python, "run_transformers", folder, evaluate)
        keep_best(best, "plain evaluation", result[f"evaluate {evaluate}"])
    for scheme in SCHEMES:
        first = calibrate if scheme.startswith("gptq") else evaluate
        run_peer(best, folder, scheme, shape, list(dict.fromkeys((first, evaluate))))


def best_batches(best: Seconds, folder: Path, shape: Shape, batches: list[int]) -> tuple[int, int]:
    """Return the peer's fastest batch sizes for calibration and for evaluation."""
    for batch in batches:
        run_peer(best, folder, "gptq-4bit", shape, [batch])

    def fastest(prefix: str) -> int:
        return min(batches, key=lambda batch: best[f"{prefix} {batch}"])

    return fastest("peer gptq-4bit batch"), fastest("peer evaluate batch")


def ratios(best: Seconds) -> dict[str, float]:
    """Return what the report is about."""
    peer = best["plain evaluation"] + sum(
        best[f"peer {scheme}"] + best[f"peer evaluate {scheme}"] for scheme in SCHEMES
    )
    return {
        "quantize": best["peer gptq-4bit"] / best["quantize"],
        "audit": peer / best["audit"],
        "without": peer / best["without"],
        "share": best["without"] / best["audit"],
        "marginal": (best["three rtn"] - best["one rtn"]) / 2 / best["plain evaluation"],
        "bound": peer / (6 * best["plain evaluation"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="15M,135M")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--windows", type=int, help="of calibration and of evaluation")
    parser.add_argument("--batches", default="1,4,16", help="what the peer may choose from")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    if not PEER_PYTHON.exists():
        sys.exit("llm-compressor is not there: run `make bench`, which installs it")
    print_machine()
    for name in options.shapes.split(","):
        for dtype in options.dtypes.split(","):
            shape = replace(SHAPES[name], windows=options.windows or SHAPES[name].windows)
            batches = [int(b) for b in options.batches.split(",")]
            measure(name, shape, dtype, batches, options.repeats)


def measure(name: str, shape: Shape, dtype: str, batches: list[int], repeats: int) -> None:
    """Print the ratios of one shape in one dtype, and the CPU seconds behind them."""
    best = Seconds()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, shape, dtype)
        chosen = best_batches(best, folder, shape, batches)
        for _ in range(repeats):
            run_round(best, folder, shape, chosen)
    print(
        f"\n{name} {dtype}, {shape.windows} windows of 512 for each of calibration and evaluation,"
    )
    print(f"groups of {shape.group}; the peer calibrates in batches of {chosen[0]}, ", end="")
    print(f"evaluates in batches of {chosen[1]}")
    for what, ratio in ratios(best).items():
        print(f"    {what:<10}{ratio:6.2f}   {GOALS.get((what, dtype), '')}")
    print("    CPU seconds: " + ", ".join(f"{k} {v:.1f}" for k, v in best.items()), flush=True)


if __name__ == "__main__":
    main()
