"""For any input the readers of saved files end in words and soon, and never in a traceback."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.table import ExperimentSummary
from qaudit.errors import AuditError, QauditError
from qaudit.planning.pin import read_lock
from qaudit.saved.audits import from_json, read_audit, to_json
from qaudit.saved.codec import decode
from qaudit.saved.results import read_measurement
from tests.support import sample

WHOLE = to_json(sample.repeated())
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1e308, 10**400, 2**63, "", "\ud800", "\x00", [], {}, [[]], {"a": []},
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict):
        found += [p for key, inner in value.items() for p in places(inner, (*path, key))]
    if isinstance(value, list) and value:
        found += places(value[0], (*path, 0))
    return found


PLACES = places(json.loads(WHOLE))


def changed(path: tuple[Any, ...], value: Any) -> str:
    document = json.loads(WHOLE)
    if not path:
        return json.dumps(value)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(document)


@given(st.sampled_from(PLACES), st.sampled_from(ODD))
def test_an_audit_with_any_value_anywhere_is_read_or_refused(path: Any, value: Any) -> None:
    try:
        audit = from_json(changed(path, value))
    except AuditError as error:
        assert error.message
        assert error.hint
    else:
        assert from_json(to_json(audit)) == audit


@given(st.text(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
).map(json.dumps))  # fmt: skip
def test_any_text_is_no_audit(text: str) -> None:
    with pytest.raises(AuditError):
        from_json(text)


@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"a":' * 10**5, "1" * 10**5, "-" * 10**6, '"\\ud800"', "1e999", "NaN"]
)
def test_text_that_stops_parsers_is_refused(text: str) -> None:
    for whole in (text, f'{{"schema": "1", "qaudit": "", "plan": {text}}}'):
        with pytest.raises(AuditError):
            from_json(whole)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_by_every_reader_of_files(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        with pytest.raises(QauditError):
            read_audit(path)
        with pytest.raises(QauditError):
            read_lock(path)
        with pytest.raises(ValueError):
            read_measurement(path)


@given(st.dictionaries(st.text(max_size=9), st.text(max_size=5) | st.none()))
def test_any_table_is_no_experiment(document: dict[str, Any]) -> None:
    with pytest.raises(AuditError):
        decode(ExperimentSummary, document, "summary")


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "audit.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
        path = tmp_path
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    with pytest.raises(AuditError):
        read_audit(path)
    with pytest.raises(QauditError):
        read_lock(path)
