"""`qaudit soup`: the folder it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import TEXT, Run, cells


@pytest.mark.usefixtures("exported")
def test_a_written_soup_measures_as_the_virtual_one(qaudit: Run, place: Path) -> None:
    written = qaudit("soup", "series", "--soup", "late=last:2", "--out", "written")
    assert (written.code, written.out) == (0, "written\n")
    assert "late: lawa:k=2:every=0 of 0.5 of step200 and 0.5 of step1000" in written.err
    schemes = ("fp", "rtn-4bit:group=32", "rtn-3bit:group=32")
    more = ("--schemes", ",".join(schemes[1:]), "--out", "out2")
    qaudit("scan", "written", *TEXT, *more, code=0)
    ours, virtual = cells(Path("out2")), cells()
    for scheme in schemes:
        assert ours["written", scheme]["ce"] == virtual["late", scheme]["ce"]
    # Checkpoints that are targets make their mean.
    done = qaudit("soup", "series/step10", "series/step200", "--out", "both", "-q")
    assert (done.code, done.err) == (0, "")
    assert (place / "both" / "model.safetensors").is_file()
