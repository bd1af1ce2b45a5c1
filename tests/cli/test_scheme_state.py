"""Schemes that keep state of every kind, from the command line: resumed, in parts, drawn again.

What a scheme holds from one linear to the next (a second stream, a rotation of heads, learned
matrices, a rounded cache) has to be the same in every process that continues. One plan of two draws
is run three times for all tests: by one process, by one that is interrupted, and in two parts.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qaudit.engine.measure
from qaudit.cli import main
from qaudit.core.registry import parse_scheme
from tests.support.cli import TEXT, audit_of
from tests.support.parts import lasting, losses
from tests.support.saved_audits import stub_pictures

CALIBRATED = (
    "gptaq-4bit:group=16",
    "qronos-4bit:group=16",
    "mr-gptq:block=16",
    "duquant-4bit:block=16",
    "flatquant-4bit:steps=3",
    "base-q-w4a4:steps=3:kv=int4",
)
DATA_FREE = ("hqq-4bit:group=16", "rtn-4bit:group=16:kv=int4")
LABELS = ("step10", "step200", "step1000")
SETTINGS = (
    "series", *TEXT, "--schemes", ",".join((*CALIBRATED, *DATA_FREE)), "--set", "repeats=2",
    "--set", "calibration_documents=2", "--set", "context=32",
)  # fmt: skip

Stream = tuple[str, str, str]  # the subject, which pass of it, and the scheme


def run(*arguments: object, interrupted_at: str | None = None) -> tuple[int, list[Stream]]:
    """Run the command line; return its exit code and every stream that it measured."""
    streams: list[Stream] = []
    send = qaudit.engine.measure.send

    def recorded(task: Any, *rest: Any) -> Any:
        if task.subject.label == interrupted_at:
            raise KeyboardInterrupt
        measured = send(task, *rest)
        streams.extend((task.subject.label, task.remark, spec) for spec in measured)
        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qaudit.engine.measure.send", recorded)
        patch.setattr("qaudit.report.folder.write", stub_pictures)
        patch.setattr(sys, "argv", ["qaudit", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
    return int(left.value.code or 0), streams


@pytest.fixture(scope="module")
def folder(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make the working directory a copy of the series and its text."""
    place = tmp_path_factory.mktemp("scheme_state") / "place"
    shutil.copytree(shipped, place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("QAUDIT_CACHE", str(place.with_name("cache")))
        yield place


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, list[Stream]]:
    """Return the audit of one process, and what it measured."""
    code, streams = run("scan", *SETTINGS, "--out", "whole")
    assert code == 0
    return folder / "whole", streams


@pytest.fixture(scope="module")
def resumed(folder: Path) -> tuple[Path, list[Stream], list[Stream]]:
    """Return the audit of two processes, and what was measured before and after the interrupt."""
    code, before = run("scan", *SETTINGS, "--out", "resumed", interrupted_at=LABELS[1])
    assert code == 130
    code, after = run("scan", *SETTINGS, "--out", "resumed")
    assert code == 0
    return folder / "resumed", before, after


@pytest.fixture(scope="module")
def collected(folder: Path) -> Path:
    """Return the audit of a plan measured in two parts."""
    assert run("plan", *SETTINGS, "--out", "collected")[0] == 0
    for code in (3, 0):  # what the first round chooses is drawn again in the second
        for part in ("0/2", "1/2"):
            assert run("part", "collected", "--part", part)[0] == 0
        assert run("collect", "collected")[0] == code
    return folder / "collected"


def of_scheme(audit: Path, text: str) -> tuple[dict[Any, bytes], list[str]]:
    """Return the losses of a scheme's documents, to the bit, and its other numbers."""
    spec = parse_scheme(text).spec
    rows = [row for row in audit_of(audit)["measurements"] if row["spec"] == spec]
    documents = {key: value for key, value in losses(audit).items() if key[1] == spec}
    return documents, sorted(map(str, lasting(rows)))


@pytest.mark.slow
@pytest.mark.parametrize("text", (*CALIBRATED, *DATA_FREE))
def test_interrupted_scans_and_parts_give_the_numbers_of_one_process_and_draw_what_calibrates(
    whole: tuple[Path, list[Stream]],
    resumed: tuple[Path, list[Stream], list[Stream]],
    collected: Path,
    text: str,
) -> None:
    spec = parse_scheme(text).spec
    every, before, after = (
        Counter(stream for stream in streams if stream[2] == spec)
        for streams in (whole[1], *resumed[1:])
    )
    assert {subject for subject, *_ in before} == {LABELS[0]}
    assert before + after == every  # nothing is measured twice
    documents, rows = of_scheme(whole[0], text)
    assert of_scheme(resumed[0], text) == of_scheme(collected, text) == (documents, rows)
    draws = (0, 1) if text in CALIBRATED else (0,)
    assert set(documents) == {(label, spec, draw) for label in LABELS for draw in draws}
    if text in CALIBRATED:
        assert all(documents[label, spec, 0] != documents[label, spec, 1] for label in LABELS)
