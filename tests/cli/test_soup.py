"""`qaudit soup`: the folder it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import Run, audit_of, refused

NAMED = ("--soup", "late=last:2")


def test_a_written_soup_measures_as_the_virtual_one(scan: Run, qaudit: Run, place: Path) -> None:
    written = qaudit("soup", "series", *NAMED, "--out", "written")
    assert (written.code, written.out) == (0, "written\n")
    assert "late: lawa:k=2:every=0 of 0.5 of step200 and 0.5 of step1000" in written.err
    assert scan("series", *NAMED).code == 0
    assert scan("written", "--out", "out2").code == 0
    virtual = {
        m["scheme"]: m["ce"]
        for m in audit_of(place / "out")["measurements"]
        if m["subject"] == "late"
    }
    real = {m["scheme"]: m["ce"] for m in audit_of(place / "out2")["measurements"]}
    assert virtual == real


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
    ],
)
def test_what_makes_no_soup_is_refused(
    qaudit: Run, place: Path, arguments: tuple[str, ...], code: int, sentence: str, hint: str
) -> None:
    refused(qaudit("soup", *arguments, "--out", "new"), code, sentence, hint)
    assert not (place / "new").exists()


def test_a_folder_that_is_there_is_not_written_over(qaudit: Run, place: Path) -> None:
    done = qaudit("soup", "series", *NAMED, "--out", "series")
    refused(done, 2, "exists already", "does not exist yet")


def test_members_with_a_damaged_file_are_refused_by_name(qaudit: Run, place: Path) -> None:
    weights = place / "series" / "step200" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    done = qaudit("soup", "series", *NAMED, "--out", "new")
    refused(done, 4, "model.safetensors", "again")
    assert not (place / "new").exists()
