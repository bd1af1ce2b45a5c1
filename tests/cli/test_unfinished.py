"""Every command that meets a scan that was interrupted says so; `report` shows what is there."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import qaudit.engine.measure
from tests.support.cli import Run, audit_of, refused

NOT_FINISHED = "`out` is not finished: 1 of 3 subjects; run it again"


@pytest.fixture
def unfinished(place: Path, scan: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Interrupt a scan of three checkpoints in the second."""
    really = qaudit.engine.measure.send

    def send(task: Any, *rest: Any) -> Any:
        if task.subject.label == "step200":
            signal.raise_signal(signal.SIGINT)
        return really(task, *rest)

    with monkeypatch.context() as patched:
        patched.setattr("qaudit.engine.measure.send", send)
        refused(scan("series"), 130, "interrupted", "run the same command again")
    return place / "out"


def test_commands_say_that_a_scan_is_not_finished(unfinished: Path, qaudit: Run) -> None:
    hint = "`qaudit scan out/plan.json --out out`"
    for command in (
        ("gate", "out"),
        ("pick", "out"),
        ("diff", "out", "out"),
        ("export", "out", "--out", "file"),
        ("publish", "out", "org/name", "--dry-run"),
    ):
        refused(qaudit(*command), 3, NOT_FINISHED, hint)
    assert not (unfinished / "audit.json").exists()


def test_a_report_shows_what_is_measured_so_far(unfinished: Path, qaudit: Run, place: Path) -> None:
    shown = qaudit("report", "out", "--format", "terminal")
    assert shown.code == 3
    assert NOT_FINISHED.replace("`", "") in shown.err.replace("`", "")
    assert "step10" in shown.out
    assert "step200: not measured yet" in shown.out
    card = qaudit("report", "out")
    assert card.code == 3
    assert "plots/" not in card.out  # nothing is drawn there yet

    assert qaudit("scan", "out/plan.json", "--out", "out").code == 0  # as the hint says
    assert len(audit_of(unfinished)["subjects"]) == 3
    assert qaudit("report", "out").code == 0


def test_nothing_measured_is_nothing_to_report(
    place: Path, scan: Run, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            "qaudit.executors.ready.read_corpus",
            lambda *_, **__: signal.raise_signal(signal.SIGINT),
        )
        scan("series")
    sentence = "`out` is not finished: 0 of 3 subjects; run it again"
    for command in (("report", "out"), ("status", "out"), ("collect", "out")):
        refused(qaudit(*command), 3, sentence, "qaudit scan out/plan.json")
