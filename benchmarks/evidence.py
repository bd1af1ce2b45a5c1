"""Measured evidence to resample from: one checkpoint and one soup, calibrated many times over.

    python -m benchmarks.evidence OUT.npz [DRAWS]

Runs `qaudit scan demo` with that many draws of calibration text, of which no two share a document,
on every evaluation document that the text of this Python has. It keeps the per-document sums:
`benchmarks/coverage.py` and `benchmarks/claim.py` draw documents and draws from them.
`benchmarks/evidence.npz` is what one machine measured; the file itself names the command and the
versions.

Arrays: S draws, two subjects, schemes and D documents: `full` (subject, D), `quantized`
(subject, scheme, S, D), `tokens` (D), `about` (JSON).
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from os import environ
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from benchmarks.clock import ONE_THREAD, ROOT
from qaudit.saved.results import read_measurement
from qaudit.types import FULL_PRECISION, Measurement, digest

Array = npt.NDArray[np.float64]
HERE = Path(__file__).parent / "evidence.npz"
CHECKPOINT, SOUP = SUBJECTS = ("stage2-ingredient3-step1000", "soup")
SCHEMES = ("gptq-4bit", "gptq-3bit", "awq-4bit")
COMMAND = (
    f"qaudit scan demo --checkpoints {CHECKPOINT} --schemes {','.join(SCHEMES)} --device cpu "
    "--set dtype=float32 --set context=256 --set bos=always --set document_tokens=160 "
    "--set evaluation_documents=1000 --set calibration_documents=32"
)


@dataclass(frozen=True, eq=False)
class Recorded:
    """Per-document sums of one file, by subject and scheme."""

    full: dict[str, Array]
    quantized: dict[tuple[str, str], Array]  # (S, D)
    tokens: Array
    about: dict[str, Any]


@cache
def recorded(path: Path = HERE) -> Recorded:
    """Read a file of evidence."""
    with np.load(path, allow_pickle=False) as arrays:
        full, quantized = arrays["full"], arrays["quantized"]
        return Recorded(
            full={subject: full[k] for k, subject in enumerate(SUBJECTS)},
            quantized={
                (subject, scheme): quantized[k, j]
                for k, subject in enumerate(SUBJECTS)
                for j, scheme in enumerate(SCHEMES)
            },
            tokens=arrays["tokens"].astype(np.float64),
            about=json.loads(str(arrays["about"])),
        )


def share(hits: int, trials: int) -> str:
    """Print a share with its Monte-Carlo error and its upper bound at 95 %."""
    p = hits / trials
    error = math.sqrt(p * (1 - p) / trials)
    upper = float(stats.beta.ppf(0.95, hits + 1, trials - hits)) if hits < trials else 1.0
    return f"{100 * p:5.1f} % +- {100 * error:.1f}, at most {100 * upper:.1f} %"


def scan(draws: int, folder: Path) -> None:
    """Run the command with so many draws."""
    words = [*shlex.split(COMMAND)[1:], "--set", f"repeats={draws}", "--out", str(folder)]
    run = [sys.executable, "-c", "from qaudit.cli import main; main()", *words]
    done = subprocess.run(
        run, cwd=ROOT, env={**environ, **ONE_THREAD}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{shlex.join(run)} failed:\n{done.stderr[-3000:]}")


def commit() -> str:
    """Return the commit that was measured with."""
    words = ["git", "rev-parse", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def collect(folder: Path, commit: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a finished scan."""
    audit = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    every = map(read_measurement, sorted((folder / "evidence").glob("*.npz")))
    measured = sorted(every, key=lambda m: m.calibration_seed)
    draws: dict[tuple[str, str], list[Measurement]] = {}
    for m in measured:
        draws.setdefault((m.subject, m.scheme), []).append(m)
    first, environment = draws[CHECKPOINT, FULL_PRECISION][0], audit["environment"]
    about = {
        "command": f"{COMMAND} --set repeats={len(draws[CHECKPOINT, SCHEMES[0]])}",
        "seeds": [m.calibration_seed for m in draws[CHECKPOINT, SCHEMES[0]]],
        "subjects": SUBJECTS,
        "schemes": {scheme: draws[CHECKPOINT, scheme][0].spec for scheme in SCHEMES},
        "documents_sha256": digest(list(first.evidence.document_sha256)),
        "environment": {k: environment[k] for k in ("python", "processor", "libraries", "qaudit")},
        "commit": commit,
    }
    quantized = [
        [np.stack([m.evidence.nll_sum for m in draws[s, q]]) for q in SCHEMES] for s in SUBJECTS
    ]
    return {
        "full": np.stack([draws[s, FULL_PRECISION][0].evidence.nll_sum for s in SUBJECTS]),
        "quantized": np.array(quantized),
        "tokens": first.evidence.tokens,
        "about": np.array(json.dumps(about)),
    }


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m benchmarks.evidence OUT.npz [DRAWS]")
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 12
    with TemporaryDirectory() as folder:
        scan(count, Path(folder))
        arrays = collect(Path(folder), commit())
    with Path(sys.argv[1]).open("wb") as file:
        np.savez_compressed(file, **arrays)
    print(f"wrote {sys.argv[1]}: {count} draws, {len(arrays['tokens'])} documents")


if __name__ == "__main__":
    main()
