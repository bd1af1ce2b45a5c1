"""A difference in every format: what is worse first, safe names, nothing that is the same."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from qaudit.report.diff import FORMATS
from qaudit.report.format import width_of
from qaudit.types import Changed, Delta, Difference, Interval, Pick
from tests.support.gate_sample import HOSTILE

SHIFTS = (Interval(0.01, 0.004, 0.016), "worse", Interval(-0.002, -0.004, 0.0), "unclear")
ROW = Delta("soup", "gptq-4bit", *SHIFTS, 64)
SAME = replace(
    ROW, subject="quiet", loss=Interval(0, 0, 0), loss_reading="same", relative_error_reading="same"
)
BETTER = replace(ROW, scheme="rtn-3bit", loss=Interval(-0.2, -0.3, -0.1), loss_reading="better")
FINE = replace(ROW, loss=None, loss_reading=None, scheme="bnb-nf4", relative_error_reading="better")
PICK = Pick("soup", "gptq-4bit", "loss", None, None, None)


def difference(*deltas: Delta) -> Difference:
    return Difference(
        a="old",
        b="new",
        paired=True,
        shared_documents=64,
        documents=(64, 80),
        unit="nats per token",
        confidence=0.95,
        at_once=8,
        deltas=deltas or (SAME, BETTER, FINE, ROW),
        notes=("compared on the 64 documents that both have",),
        protocol=(Changed("corpus_sha256", "a" * 64, "b" * 64),),
        software=(Changed("torch", "2.13.0", None),),
        weights=("soup",),
        specs=(),
        subjects=(Changed("gone", "gone", None), Changed("new", None, "new")),
        schemes=(),
        picks=(PICK, replace(PICK, scheme="awq-4bit")),
    )


def hostile() -> Difference:
    bad = Changed(HOSTILE, HOSTILE, HOSTILE + "2")
    row = replace(ROW, subject=HOSTILE, scheme=HOSTILE)
    changes = {"protocol": (bad,), "software": (bad,), "specs": (bad,), "weights": (HOSTILE,)}
    picks = (replace(PICK, subject=HOSTILE), None)
    return replace(difference(row), a=HOSTILE, b=HOSTILE, picks=picks, **changes)


def wide() -> Difference:
    return difference(replace(ROW, subject="\u6aa2\u67e5\u9ede" * 20, scheme="\u6aa2" * 9), ROW)


def test_the_terminal_says_what_is_worse_first_and_leaves_out_what_is_the_same() -> None:
    text = FORMATS["terminal"](difference())
    said = " ".join(text.split())
    assert "Losses: 1 worse, 1 better and 1 unchanged." in said
    assert "Added losses: 1 better, 2 inconclusive and 1 unchanged." in said
    assert "The pick was soup at gptq-4bit and is soup at awq-4bit." in said
    assert "paired on 64 documents; all 8 intervals hold at once at 95 %" in said
    assert "quiet" not in text
    rows = [" ".join(line.split()[1:3]) for line in text.splitlines() if line.startswith("soup ")]
    first = ["gptq-4bit worse", "rtn-3bit better", "bnb-nf4 better"]
    assert rows == [*first, "rtn-3bit inconclusive", "gptq-4bit inconclusive"]
    assert "0.0100 [0.0040, 0.0160]" in text
    assert "- corpus_sha256: aaaaaaaaaaaa.. in a, bbbbbbbbbbbb.. in b" in text
    assert "- torch: 2.13.0 in a, not recorded in b" in text
    assert "- a: gone\n- b: new" in text
    for found in (difference(), hostile(), wide()):
        lines = FORMATS["terminal"](found).splitlines()
        assert [line for line in lines if width_of(line) > 80] == []


def test_a_pick_that_stays_is_said_to_stay_and_nothing_in_common_to_be_nothing() -> None:
    assert "The pick stays `soup` at" in FORMATS["md"](replace(difference(), picks=(PICK, PICK)))
    assert "Neither audit picks" in FORMATS["md"](replace(difference(), picks=(None, None)))
    assert "nothing to compare" in FORMATS["md"](replace(difference(), deltas=()))


def test_many_rows_are_counted() -> None:
    many = difference(*(replace(ROW, subject=f"step{k}") for k in range(250)))
    assert "and 50 rows more" in FORMATS["terminal"](many)
    assert "and 50 rows more" in FORMATS["md"](many)
    assert len(json.loads(FORMATS["json"](many))["deltas"]) == 250


@pytest.mark.parametrize("form", FORMATS)
def test_no_name_brings_a_control_character_or_markup(form: str) -> None:
    text = FORMATS[form](hostile())
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    if form == "md":
        outside = re.sub(r"`[^`\n]*`", "", text)
        assert "<script" not in outside
        assert "](" not in outside


def test_json_holds_every_number_and_null_where_there_is_none() -> None:
    found = json.loads(FORMATS["json"](difference()))
    rows = {(row["subject"], row["scheme"]): row for row in found["deltas"]}
    row = rows["soup", "gptq-4bit"]
    assert (row["loss"], row["loss_low"], row["loss_high"]) == (0.01, 0.004, 0.016)
    assert row["loss_reading"] == "worse"
    assert rows["soup", "bnb-nf4"]["loss_low"] is None
    assert found["pick_changed"] is True
    assert found["picks"][1]["scheme"] == "awq-4bit"
    assert found["software"] == [{"what": "torch", "a": "2.13.0", "b": None}]
