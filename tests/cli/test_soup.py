"""`qaudit soup`: the folder it writes, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.cli import TEXT, Run, audit_of, refused

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


@pytest.mark.parametrize(
    ("arguments", "code", "sentence", "hint"),
    [
        (("series",), 2, "3 checkpoints are in series, ", "last:4"),
        (("series", "--soup", "last:9"), 2, "a window of 9 is longer than the series", "k=3"),
        (("series", "--soup", "subsets:2(step*)"), 2, "makes 3 soups", "one of them"),
        (("series", "--soup", "step10"), 2, "has one member, `step10`", "two or more"),
        (("series/step10", "--soup", "step10+step200"), 2, "no checkpoint `step200`", "step10"),
        (("serie", *NAMED), 2, "there is no folder `serie`", "series"),
        (("series", *NAMED, "--set", "disk_budget=x"), 2, "`x` is not a size", "4GB"),
        (("series", *NAMED, "--set", "context=9"), 2, "takes no `context`", "disk_budget"),
        (("series", *NAMED, "--out", "series"), 2, "exists already", "does not exist yet"),
        (
            ("damaged", "series/step200", "--soup", "damaged+step200"),
            4,
            "model.safetensors",
            "again",
        ),
    ],
)
def test_what_makes_no_soup_is_refused(
    qaudit: Run, place: Path, arguments: tuple[str, ...], code: int, sentence: str, hint: str
) -> None:
    shutil.copytree("series/step10", "damaged")
    weights = Path("damaged/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-9])
    refused(qaudit("soup", "--out", "new", *arguments), code, sentence, hint)
    assert not (place / "new").exists()
