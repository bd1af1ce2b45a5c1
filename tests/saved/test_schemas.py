"""The published schemas are those of the types, and what is written keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from qaudit.saved.audits import DOCUMENTS, path_of, plan_to_json, text_of_schema
from tests.support import sample


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_file_is_what_the_types_say(name: str) -> None:
    written = path_of(name).read_text(encoding="utf-8")
    assert written == text_of_schema(name), "run `python -m qaudit.saved.audits`"
    jsonschema.Draft202012Validator.check_schema(json.loads(written))


def test_a_plan_keeps_its_schema() -> None:
    schema = json.loads(path_of("plan").read_text(encoding="utf-8"))
    plan = json.loads(plan_to_json(sample.audit().plan))
    assert list(jsonschema.Draft202012Validator(schema).iter_errors(plan)) == []


def test_every_schema_has_a_file_and_every_file_a_schema() -> None:
    files = {path.name for path in Path(path_of("audit")).parent.glob("*.schema.json")}
    assert files == {path_of(name).name for name in DOCUMENTS}
