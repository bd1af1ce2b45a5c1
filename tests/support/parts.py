"""Plans measured in parts: the commands in processes of their own, and what must be equal."""

import os
import subprocess
import sys
import time
from pathlib import Path

from qaudit.audit import load
from tests.support.cli import audit_of
from tests.support.models import save_model, save_tokenizer, write_documents

MAIN = "from qaudit.cli import main; main()"
ROOT = Path(__file__).parents[2]


def start(place, *arguments, main=MAIN, before=(), **variables):
    """Start a command in a process of its own; `before` is a command that starts it."""
    return subprocess.Popen(
        [*before, sys.executable, "-c", main, *map(str, arguments)],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, code=0):
    """Wait for a command that ends with a code; return what it said on stderr."""
    _, said = process.communicate(timeout=300)
    assert process.returncode == code, said
    return said


def until(there, seconds=300):
    """Wait for a condition."""
    ends = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < ends, f"not within {seconds} s"
        time.sleep(0.01)


def losses(folder):
    """Return the losses of every document, to the bit."""
    found = load(folder).evidence.measurements
    return {(m.subject, m.spec, m.calibration_seed): m.evidence.nll_sum.tobytes() for m in found}


def same_audit(a, b):
    """Assert that two audits have the same numbers, evidence and conclusions."""
    assert losses(a) == losses(b)
    first, second = audit_of(a), audit_of(b)
    for name in ("measurements", "comparisons", "verdict", "pick", "tasks", "skipped", "subjects"):
        assert lasting(first[name]) == lasting(second[name]), name
    assert {f["rule"] for f in first["findings"]} == {f["rule"] for f in second["findings"]}


def lasting(rows):
    """Return rows without a clock's seconds and the hashes of files in which they are."""
    if not isinstance(rows, list):
        return rows
    moved = ("seconds", "evidence_sha256")
    return [{name: value for name, value in row.items() if name not in moved} for row in rows]


def demo(folder):
    """Write a tiny series and its text; return the targets and options of a scan of it."""
    for seed, step in enumerate((10, 200, 1000)):
        if not (folder / "series" / f"step{step}").exists():
            save_tokenizer(save_model(folder / "series" / f"step{step}", seed))
    write_documents(folder / "calibration.jsonl", range(100, 108))
    write_documents(folder / "evaluation.jsonl", range(200, 212))
    text = ("--calibration", folder / "calibration.jsonl", "--evaluation")
    schemes = ("--schemes", "gptq-3bit:group=16,rtn-3bit:group=16", "--set", "context=32")
    soup = ("--soup", "step10+step200", "--set", "calibration_documents=2")
    return (folder / "series", *text, folder / "evaluation.jsonl", *schemes, *soup)
