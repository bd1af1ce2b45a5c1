"""How time is taken here: CPU seconds of the process, one thread, interleaved, best of n.

Wall time says little on a machine that others use too, and CPU seconds of several threads grow
with every wait at a barrier. One thread's CPU seconds, taken in turns and compared as ratios
within one run, are what repeats. The matmul rate of the same run stands beside them. On a GPU it
is the seconds of a clock, as the host only waits there.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}
ROOT = Path(__file__).resolve().parent.parent
DEVICE_VARIABLE = "QAUDIT_BENCHMARK_DEVICE"
DEVICE = os.environ.get(DEVICE_VARIABLE, "cpu")  # of the processes that are timed
PEER_PYTHON = ROOT / ".peers" / "llmcompressor" / "bin" / "python"


def now() -> float:
    """Return CPU seconds of this process, or the clock once a GPU has ended what it was given."""
    if DEVICE == "cpu":
        return time.process_time()
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def best_of(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the least CPU seconds of each run, all of them taken in turns."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - began)
    return best


def run_apart(python: Path | str, script: str, *arguments: object) -> dict[str, float]:
    """Run a script of this folder in a process of its own; return the JSON it prints last."""
    command = [str(python), "-m", f"benchmarks.{script}", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def print_machine() -> None:
    """Name the processor, its matmul rates on one thread, and the versions that matter."""

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ] or [platform.processor()]
    rates = ", ".join(f"{kind} {_matmul_rate(kind):.0f}" for kind in ("float32", "bfloat16"))
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers"))
    print(f"{names[0]}, {os.cpu_count()} cores; one thread, GFLOP/s of a matmul: {rates}")
    print(f"Python {platform.python_version()}, {packages}")


def _matmul_rate(dtype: str) -> float:
    import torch

    torch.set_num_threads(1)
    a = torch.randn(2048, 2048).to(getattr(torch, dtype))
    seconds = best_of({"matmul": lambda: a @ a}, 5)["matmul"]
    return 2 * 2048**3 / seconds / 1e9
