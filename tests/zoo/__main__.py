"""Try every type, and write results.json and docs/models.*; `python -m tests.zoo [TYPE ...]`.

Each result is appended to build/zoo.jsonl as it comes, so that a run that was cut goes on.
Exits with 1 where a type is wrong, or ran before and does not any more.
With `--drawn N`, N drawn configurations and texts of each type are tried instead (`drawn.py`).
"""

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch
import transformers

from tests.zoo import drawn, tiny
from tests.zoo.audit import result_of
from tests.zoo.page import page, table

ROOT = Path(__file__).parents[2]
PAGE, TABLE = ROOT / "docs/models.md", ROOT / "docs/models.csv"
RESULTS = Path(__file__).with_name("results.json")
PARTIAL = ROOT / "build/zoo.jsonl"


def main():
    parser = argparse.ArgumentParser(description="try every type of the installed transformers")
    parser.add_argument("types", nargs="*", help="only these, and write no page")
    parser.add_argument("--drawn", type=int, default=0, help="draw so many configurations of each")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none later")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if arguments.drawn:
        return run_drawn(arguments.types or [*tiny.decoders(), *tiny.wrappers()], arguments.drawn)
    if arguments.types:
        for name in arguments.types:
            sys.stdout.write(f"{name} {json.dumps(result_of(name))}\n")
        return 0
    results = {"transformers": transformers.__version__, "types": run_all(arguments.seconds)}
    before = json.loads(RESULTS.read_text())["types"] if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))
    TABLE.write_text(table(results))
    PARTIAL.unlink()
    return report_worse(before, results["types"])


def run_all(seconds):
    PARTIAL.parent.mkdir(exist_ok=True)
    PARTIAL.touch()
    results = dict(json.loads(line) for line in PARTIAL.read_text().splitlines())
    started = time.monotonic()
    for name in (*tiny.decoders(), *tiny.wrappers()):
        if name in results:
            continue
        if time.monotonic() - started > seconds:
            results[name] = {"runs": "not tried", "reason": "the time of this run was up"}
            continue
        results[name] = result_of(name)
        sys.stdout.write(f"{name}: {results[name]['runs']} {results[name].get('reason', '')}\n")
        sys.stdout.flush()
        with PARTIAL.open("a") as file:
            file.write(json.dumps([name, results[name]]) + "\n")
    return results


def run_drawn(types, count):
    """Print the draws that are neither equal nor refused; return whether there is one."""
    wrong = 0
    for name in types:
        for seed in range(count):
            if (result := drawn.result_of(name, seed))["is"] == "wrong":
                wrong += 1
                sys.stdout.write(f"{name} {seed} {json.dumps(result)}\n")
    return 1 if wrong else 0


def report_worse(before, after):
    worse = [
        name
        for name, row in after.items()
        if row["runs"] == "wrong"
        or (row["runs"] != "in blocks" and before.get(name, row)["runs"] == "in blocks")
    ]
    for name in worse:
        sys.stderr.write(f"{name}: {after[name]['runs']}: {after[name]['reason']}\n")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
