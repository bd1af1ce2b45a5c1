"""`--claim`: what a verdict is about, from the scan to the gate."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.cli import TEXT, Run, audit_of, refused

GPTQ = "gptq-3bit:group=16"
TINY = ("--calibration-documents", "2", "--context", "32", "--checkpoints", "step1000")
SCAN = ("scan", "series", *TEXT, *TINY, "--schemes", GPTQ)


@pytest.fixture
def claimed(place: Path, qaudit: Run) -> Path:
    """Return an audit about the file with a draw that it does not need."""
    assert qaudit(*SCAN, "--repeats", 2, "--out", "out").code == 0
    return place / "out"


def test_a_file_is_judged_by_its_draw_and_another_calibration_is_one_line(
    claimed: Path, qaudit: Run
) -> None:
    audit = audit_of(claimed)
    assert audit["schema"] == "1"
    assert (audit["plan"]["claim"], audit["verdict"]["claim"]) == ("file", "file")
    assert [row["claim"] for row in audit["pooled"]] == ["method"]
    (decided,) = audit["verdict"]["classes"]
    (row,) = [
        row
        for row in audit["measurements"]
        if row["scheme"] == GPTQ and row["calibration_seed"] == 0
    ]
    assert decided["relative_error"] == row["relative_error"]
    card = " ".join((claimed / "card.md").read_text(encoding="utf-8").split())
    assert "The verdict is about the file: the weights of one calibration." in card
    assert f"It would move the added loss of `step1000` at {GPTQ} by" in card
    assert "(the standard deviation of 2 draws)" in card
    assert qaudit("gate", claimed).code in (0, 1, 3)
    method = qaudit(*SCAN, "--claim", "method", "--repeats", 2, "--out", "method")
    assert method.code == 0
    for command in (("gate", claimed, "--baseline", "method"), ("diff", "method", claimed)):
        done = qaudit(*command)
        refused(done, 2, "is about a file and `method` about a method", "scan `method` again: ")
    again = shlex.split(done.err.partition("again: `")[2].partition("`")[0])
    assert again[again.index("--claim") + 1] == "file"
    assert qaudit(*again[1:], "--out", "method").code == 0
    assert qaudit("diff", "method", claimed).code == 0


def test_a_policy_of_another_claim_is_refused(place: Path, claimed: Path, qaudit: Run) -> None:
    (place / "method.yaml").write_text("extends: release\nclaim: method\n")
    done = qaudit("gate", claimed, "--policy", "method.yaml")
    refused(done, 2, "is about a file, and the policy `method` about a method", "--claim method")
    done = qaudit(*SCAN, "--policy", "method.yaml", "--claim", "file", "--out", "other")
    refused(done, 2, "`--claim file` is against the policy", "leave out `--claim`")
    assert not (place / "other").exists()
