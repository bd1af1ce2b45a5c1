"""`qaudit diff` from the command line: two folders, three formats, exit code 0 if it compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.cli import Run, audit_of, refused


def test_two_scans_are_compared_and_the_exit_code_is_0(scan: Run, qaudit: Run, place: Path) -> None:
    assert scan("series/step10").code == 0
    shutil.move(place / "out", place / "before")
    assert scan("series/step10", "--schemes", "rtn-3bit").code == 0
    done = qaudit("diff", "before", "out")
    assert done.code == 0
    said = " ".join(done.out.split())
    assert "Losses: 2 unchanged. Added losses: 1 unchanged." in said
    assert "- b: rtn-3bit" in done.out
    assert done.err == ""

    found = json.loads(qaudit("diff", "before", "out", "--format", "json").out)
    assert (found["paired"], found["a"], found["b"]) == (True, "before", "out")
    assert "b is `out`" in qaudit("diff", "before", "out", "--format", "md").out
    refused(qaudit("diff", "before", "out", "--format", "html"), 2, "no format `html`", "terminal")

    # The same numbers with an edited audit, then without evidence.
    text = json.dumps(audit_of(place / "out")).replace('"ce": ', '"ce": 1', 1)
    (place / "out" / "audit.json").write_text(text, encoding="utf-8")
    assert qaudit("diff", "before", "out").code == 2
    shutil.rmtree(place / "before" / "evidence")
    assert qaudit("diff", "before", "before").code == 4


def test_an_audit_that_is_not_there_is_named(qaudit: Run, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    refused(qaudit("diff", missing, missing), 2, "there is no audit", "output folder")
