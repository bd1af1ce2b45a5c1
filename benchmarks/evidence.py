"""Measured evidence to resample from: one checkpoint and one soup, calibrated many times over.

    python -m benchmarks.evidence OUT.npz [SEEDS]

Runs `qaudit scan demo` once for each calibration seed, on every evaluation document the text
of this Python has, and keeps the per-document sums: `benchmarks/coverage.py` and
`benchmarks/trials.py` draw documents and seeds from them. `benchmarks/evidence.npz` is what
one machine measured; the file itself names the command and the versions.

Arrays: S seeds, two subjects, schemes and D documents: `full` (subject, D), `quantized`
(subject, scheme, S, D), `tokens` (D), `about` (JSON).
"""

from __future__ import annotations

import json
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

from benchmarks.clock import ONE_THREAD, ROOT
from qaudit.saved.results import measured_in
from qaudit.types import FULL_PRECISION, Measurement, digest

Array = npt.NDArray[np.float64]
HERE = Path(__file__).parent / "evidence.npz"
CHECKPOINT, SOUP = SUBJECTS = ("stage2-ingredient3-step1000", "soup")
SCHEMES = ("gptq-4bit", "gptq-3bit")
COMMAND = (
    f"qaudit scan demo --checkpoints {CHECKPOINT} --schemes {','.join(SCHEMES)} --dtype float32 "
    "--device cpu --context 256 --bos always --document-tokens 160 --evaluation-documents 1000 "
    "--calibration-documents 32"
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


def scan(seed: int, folder: Path) -> tuple[dict[tuple[str, str], Measurement], dict[str, Any]]:
    """Run the command with one calibration seed; return what it measured, and where."""
    words = [*shlex.split(COMMAND)[1:], "--calibration-seed", str(seed), "--out", str(folder)]
    run = [sys.executable, "-c", "from qaudit.cli import main; main()", *words]
    done = subprocess.run(
        run, cwd=ROOT, env={**environ, **ONE_THREAD}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{shlex.join(run)} failed:\n{done.stderr[-3000:]}")
    audit = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    found = {(m.subject, m.scheme): m for m in measured_in(folder / "evidence")}
    return found, audit["environment"]


def commit() -> str:
    """Return the commit that was measured with."""
    words = ["git", "rev-parse", "HEAD"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def collect(seeds: range) -> dict[str, npt.NDArray[Any]]:
    """Measure every seed; documents and full precision must be the same each time."""
    full, quantized, first = None, [], None
    for seed in seeds:
        with TemporaryDirectory() as folder:
            found, environment = scan(seed, Path(folder))
        first = first or found[SUBJECTS[0], FULL_PRECISION]
        for m in found.values():
            if m.evidence.document_sha256 != first.evidence.document_sha256:
                sys.exit(f"seed {seed} was measured on other documents")
        again = np.stack([found[s, FULL_PRECISION].evidence.nll_sum for s in SUBJECTS])
        full = again if full is None else full
        if not np.array_equal(full, again):
            sys.exit(f"full precision differs at seed {seed}")
        quantized.append([[found[s, q].evidence.nll_sum for q in SCHEMES] for s in SUBJECTS])
        print(f"seed {seed}", flush=True)
    if first is None or full is None:
        sys.exit("no seeds were asked for")
    about = {
        "command": f"{COMMAND} --calibration-seed N",
        "seeds": list(seeds),
        "subjects": SUBJECTS,
        "schemes": {q: found[SUBJECTS[0], q].spec for q in SCHEMES},
        "documents_sha256": digest(list(first.evidence.document_sha256)),
        "environment": {k: environment[k] for k in ("python", "processor", "libraries", "qaudit")},
        "commit": commit(),
    }
    return {
        "full": full,
        "quantized": np.moveaxis(np.array(quantized), 0, 2),
        "tokens": first.evidence.tokens,
        "about": np.array(json.dumps(about)),
    }


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m benchmarks.evidence OUT.npz [SEEDS]")
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    arrays = collect(range(count))
    with Path(sys.argv[1]).open("wb") as file:
        np.savez_compressed(file, **arrays)
    print(f"wrote {sys.argv[1]}: {count} seeds, {len(arrays['tokens'])} documents")


if __name__ == "__main__":
    main()
