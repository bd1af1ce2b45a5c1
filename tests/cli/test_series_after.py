"""`qaudit series --after`: what is worth measuring next, by an audit of some of a series."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import sample
from tests.support.cli import Run, refused
from tests.support.saved_audits import save


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    """Return an audit of nine checkpoints of the demo's run of twelve."""
    left = ("stage1-step1750", "stage1-step4000", "stage2-ingredient1-step750")
    few = tuple(s for s in sample.series() if s.kind == "checkpoint" and s.label not in left)
    save(tmp_path / "out", subjects=few)
    return tmp_path / "out"


def test_the_unmeasured_checkpoints_are_named_with_what_is_predicted(
    qaudit: Run, audit: Path
) -> None:
    done = qaudit("series", "demo", "--after", audit, "--json")
    assert done.code == 0
    found = json.loads(done.out)
    names = {row["label"] for row in found["prospects"]}
    assert names == {"stage1-step1750", "stage1-step4000", "stage2-ingredient1-step750"}
    # The loss falls fastest at the end of the decay, where the last measured neighbours are best.
    assert found["prospects"][0]["label"] == "stage2-ingredient1-step750"
    assert "--checkpoints stage2-ingredient1-step750" in done.err
    shown = qaudit("series", "demo", "--after", audit, "-q")
    assert "Error at checkpoints left out, quantized loss" in shown.out


def test_an_audit_of_another_series_is_refused(qaudit: Run, audit: Path, place: Path) -> None:
    done = qaudit("series", place / "series", "--after", audit)
    refused(done, 2, "no checkpoint of", "an audit of the same series")
