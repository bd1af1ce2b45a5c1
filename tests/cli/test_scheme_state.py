"""Schemes that keep state of every kind, from the command line: resumed, in parts, drawn again.

What a scheme holds from one linear to the next (a second stream, a rotation of heads, learned
matrices, a rounded cache) has to be the same in every process that continues. One plan of two draws
is run three times for all tests: by one process, by one that is interrupted, and in two parts.
"""

import shutil
import sys
from collections import Counter
from pathlib import Path

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


def run(code, *arguments, interrupted_at=None):
    """Run the command line, which ends with a code; return every stream that it measured."""
    streams = []
    send = qaudit.engine.measure.send

    def recorded(task, *rest):
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
    assert int(left.value.code or 0) == code
    return streams


@pytest.fixture(scope="module")
def streams(shipped, tmp_path_factory):
    """Return what one process measured, and what two did before and after an interrupt.

    The working directory has the audits: `whole`, `resumed`, and `collected` from two parts.
    """
    place = shutil.copytree(shipped, tmp_path_factory.mktemp("scheme_state") / "place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("QAUDIT_CACHE", str(place.with_name("cache")))
        every = run(0, "scan", *SETTINGS, "--out", "whole")
        before = run(130, "scan", *SETTINGS, "--out", "resumed", interrupted_at=LABELS[1])
        after = run(0, "scan", *SETTINGS, "--out", "resumed")
        run(0, "plan", *SETTINGS, "--out", "collected")
        for code in (3, 0):  # what the first round chooses is drawn again in the second
            for part in ("0/2", "1/2"):
                run(0, "part", "collected", "--part", part)
            run(code, "collect", "collected")
        yield [every, before, after]


def of_scheme(audit, spec):
    """Return the losses of a scheme's documents, to the bit, and its other numbers."""
    rows = [row for row in audit_of(audit)["measurements"] if row["spec"] == spec]
    documents = {key: value for key, value in losses(audit).items() if key[1] == spec}
    return documents, sorted(map(str, lasting(rows)))


@pytest.mark.slow
@pytest.mark.parametrize("text", (*CALIBRATED, *DATA_FREE))
def test_interrupted_scans_and_parts_give_the_numbers_of_one_process_and_draw_what_calibrates(
    streams, text
):
    spec = parse_scheme(text).spec
    every, before, after = (Counter(one for one in run if one[2] == spec) for run in streams)
    assert {subject for subject, *_ in before} == {LABELS[0]}
    assert before + after == every  # nothing is measured twice
    documents, rows = of_scheme(Path("whole"), spec)
    for name in ("resumed", "collected"):
        assert of_scheme(Path(name), spec) == (documents, rows)
    draws = (0, 1) if text in CALIBRATED else (0,)
    assert set(documents) == {(label, spec, draw) for label in LABELS for draw in draws}
    if text in CALIBRATED:
        assert all(documents[label, spec, 0] != documents[label, spec, 1] for label in LABELS)
