"""`qaudit soup`: the folder it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import TEXT, Run, audit_of

NAMED = ("--soup", "late=last:2")


def losses(out: Path, subject: str) -> dict[str, float]:
    rows = [row for row in audit_of(out)["measurements"] if row["subject"] == subject]
    return {row["scheme"]: row["ce"] for row in rows}


@pytest.mark.usefixtures("exported")
def test_a_written_soup_measures_as_the_virtual_one(qaudit: Run) -> None:
    written = qaudit("soup", "series", *NAMED, "--out", "written")
    assert (written.code, written.out) == (0, "written\n")
    assert "late: lawa:k=2:every=0 of 0.5 of step200 and 0.5 of step1000" in written.err
    more = ("--schemes", "rtn-4bit:group=32,rtn-3bit:group=32", "--out", "out2")
    assert qaudit("scan", "written", *TEXT, *more).code == 0
    assert losses(Path("out2"), "written") == losses(Path("out"), "late")


def test_checkpoints_that_are_targets_make_their_mean(qaudit: Run, place: Path) -> None:
    done = qaudit("soup", "series/step10", "series/step200", "--out", "both", "-q")
    assert (done.code, done.err) == (0, "")
    assert (place / "both" / "model.safetensors").is_file()
