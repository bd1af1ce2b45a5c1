"""Audits as older versions wrote them are read, judged by the schema, and rendered in every form.

`audits/first.json` is what the first version that could write an audit made of a small sample.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from qaudit.report.card import render as render_card
from qaudit.report.figures import write
from qaudit.report.folder import FORMATS, render
from qaudit.saved.audits import from_json, read_audit, to_json
from qaudit.saved.schemas import path_of

AUDITS = Path(__file__).parent / "audits"
FIRST = AUDITS / "first.json"
SCHEMA = path_of("audit")


@pytest.mark.parametrize("form", FORMATS)
def test_the_first_audit_is_rendered_in_every_form(form: str) -> None:
    text = render(read_audit(FIRST), form)
    for label in ("stage1-step5000", "stage1-step500", "soup"):
        assert label in text


def test_the_first_audit_keeps_its_numbers() -> None:
    document = json.loads(FIRST.read_text(encoding="utf-8"))
    again = json.loads(to_json(from_json(FIRST.read_text(encoding="utf-8"))))
    for old, new in zip(document["measurements"], again["measurements"], strict=True):
        assert old == {key: new[key] for key in old}
    assert document["comparisons"] == again["comparisons"]
    row = next(m for m in document["measurements"] if m["scheme"] == "rtn-3bit")
    assert f"| {100 * row['relative_error']:.1f}<br>" in render_card(read_audit(FIRST))


def test_the_first_audit_is_still_what_the_schema_describes() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    document = json.loads(FIRST.read_text(encoding="utf-8"))
    assert [e.message for e in Draft202012Validator(schema).iter_errors(document)] == []


def test_the_pictures_of_the_first_audit_are_drawn(tmp_path: Path) -> None:
    names = {path.name for path in write(read_audit(FIRST), tmp_path)}
    assert {"trajectory.svg", "quantized.svg", "soups.svg", "pareto.svg"} <= names
