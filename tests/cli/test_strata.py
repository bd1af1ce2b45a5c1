"""Strata: shown by the same evidence, whatever the field, and refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qaudit.saved.results import read_measurement
from tests.support.cli import Outcome, Run, audit_of, refused
from tests.support.models import text


@pytest.fixture
def grouped(place: Path) -> Path:
    """Give evaluation documents two fields."""
    lines = [
        {"text": text(200 + k), "source": ("web", "code")[k % 3 > 0], "half": k // 6, "id": k}
        for k in range(12)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    (place / "evaluation.jsonl").write_text(content, encoding="utf-8")
    return place


def strata(place: Path) -> set[tuple[str, ...]]:
    rows = audit_of(place / "out")["measurements"]
    return {read_measurement(place / "out" / row["evidence"]).evidence.strata for row in rows}


def test_another_field_needs_no_new_measurement(grouped: Path, scan: Run) -> None:
    assert scan("series/step10").code == 0
    seconds = [row["seconds"] for row in audit_of(grouped / "out")["measurements"]]
    for field, expected in (
        ("source", ("web", "code", "code") * 4),
        ("half", ("0",) * 6 + ("1",) * 6),
        (None, ()),
    ):
        assert scan("series/step10", *(["--set", f"strata={field}"] if field else [])).code == 0
        audit = audit_of(grouped / "out")
        assert [row["seconds"] for row in audit["measurements"]] == seconds
        assert strata(grouped) == {expected}
        rows = audit["diagnostics"].get("strata", [])
        assert {row["stratum"] for row in rows} == set(expected)
        assert all((row["kl"] is None) == (row["scheme"] == "fp") for row in rows)
        assert audit["plan"]["protocol"]["sources"].get("strata") == field


def test_a_field_that_groups_nothing_is_refused_by_the_plan(grouped: Path, scan: Run) -> None:
    def dry(*more: object) -> Outcome:
        return scan("series/step10", "--dry-run", *more)

    refused(
        dry("--set", "strata=origin"), 2, "no value of the field `origin`", "its fields are text"
    )
    refused(dry("--set", "strata=id"), 2, "each of the 12 evaluation documents", "strata=source")
    refused(
        dry("--set", "strata=source", "--set", "packed=true"),
        2,
        "packed windows",
        "leave out `packed`",
    )
    (grouped / "evaluation.txt").write_text("one two three", encoding="utf-8")
    plain = dry("--evaluation", "evaluation.txt", "--set", "strata=source")
    refused(plain, 2, "is plain text", "`--evaluation`")
