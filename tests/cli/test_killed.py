"""Scans that are killed before any change of a file, again and again, end as if they were whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cli import TEXT, Run, audit_of, settings
from tests.support.hub import Hub

KILLS = 12
CHANGES = 36
"""Of files, by a scan of which all is measured: it plans and reports again."""
SOUP = ("--soup", "step10+step200", "--schemes", "rtn-4bit,gptq-4bit:group=16")

# Imports once and forks for every scan, which is told how many changes of files it may make. At a
# kill, a file that is opened to be written is empty. Prints the exit status of each.
SCANS = """
import json, os, signal, sys
from contextlib import suppress

import matplotlib.pyplot
from transformers.models.llama import modeling_llama
import qaudit.audit, qaudit.report.folder
from qaudit.cli import main
from tests.support.saved_audits import stub_pictures

qaudit.report.folder.write = stub_pictures
root, changes, allowed = sys.argv[1], 0, 0

def count(event, arguments):
    global changes
    opens = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if not opens and event != "os.rename" or isinstance(arguments[0], int) or changes > allowed:
        return
    if not os.path.abspath(os.fsdecode(arguments[0])).startswith(root):
        return
    changes += 1
    if changes > allowed:
        with suppress(OSError):  # of a folder that is not made yet
            os.open(arguments[0], arguments[2]) if opens else None
        os.kill(os.getpid(), signal.SIGKILL)

for line in sys.stdin:
    allowed, *sys.argv[1:] = json.loads(line)
    if not (child := os.fork()):
        sys.stdout = sys.stderr = open(os.devnull, "w")
        sys.addaudithook(count)
        try:
            main()
        except SystemExit as end:
            os._exit(end.code or 0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def scans(place: Path) -> Iterator[Callable[..., int]]:
    """Yield a function that scans with a number of changes allowed."""
    with subprocess.Popen(
        [sys.executable, "-c", SCANS, str(place.parent)],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def scan(allowed: int, *arguments: str) -> int:
            print(json.dumps([allowed, "scan", *arguments]), file=process.stdin, flush=True)
            return int(process.stdout.readline())

        yield scan
        process.stdin.close()


def numbers(folder: Path) -> list[tuple[object, ...]]:
    names = ("subject", "spec", "ce", "ce_low", "ce_high", "relative_error", "documents")
    return [tuple(row[name] for name in names) for row in audit_of(folder)["measurements"]]


def survive(place: Path, qaudit: Run, target: str, seed: int) -> None:
    """Kill a scan before random changes, each later than the one before, and let it end."""
    arguments = [target, *TEXT, *SOUP, "--out"]
    moments = sorted(random.Random(seed).sample(range(CHANGES), KILLS))
    with scans(place) as scan:
        assert scan(sys.maxsize, *arguments, "whole") == 0
        statuses = [scan(moment, *arguments, "out") for moment in moments]
        assert set(statuses) == {-signal.SIGKILL}, statuses
        assert scan(sys.maxsize, *arguments, "out") == 0
    assert numbers(place / "out") == numbers(place / "whole")
    assert qaudit("gate", place / "out", "-q").code in (0, 1, 3)


@pytest.mark.slow
def test_kills_over_folders_change_nothing(place: Path, qaudit: Run) -> None:
    survive(place, qaudit, "series", seed=1)


@pytest.mark.slow
def test_kills_over_the_hub_change_nothing(
    place: Path, online: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (online / "root" / "lab").mkdir(parents=True)
    shutil.move(place / "series", online / "root" / "lab" / "tiny")
    settings(online / "root" / "lab" / "tiny", branch_per_revision=True)
    with Hub(online / "root").running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        survive(place, qaudit, "lab/tiny", seed=2)
