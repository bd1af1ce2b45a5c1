"""For any input the readers of saved files end in words and soon, and never in a traceback."""

from __future__ import annotations

import copy
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.table import ExperimentSummary
from qaudit.errors import AuditError, QauditError
from qaudit.hub import answers
from qaudit.hub.answers import GarbledError
from qaudit.planning.pin import read_lock
from qaudit.saved.audits import from_json, read_audit, to_json
from qaudit.saved.codec import decode
from qaudit.saved.results import read_measurement
from qaudit.text.documents import read_choices
from qaudit.text.tokenizer import Cutter, load_tokenizer
from qaudit.types import Document, Protocol
from tests.support import sample
from tests.support.models import save_tokenizer

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
    document = {"": json.loads(WHOLE)}
    inner: Any = document
    *places, last = ("", *path)
    for key in places:
        inner = inner[key]
    inner[last] = value
    return json.dumps(document[""])


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


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a name for files that are written again and again."""
    return tmp_path_factory.mktemp("readers") / "file"


@given(st.binary(max_size=300), st.dictionaries(st.text(max_size=9), st.text(max_size=5)))
def test_any_bytes_are_refused_by_every_reader_of_files_and_any_table_is_no_experiment(
    file: Path, content: bytes, table: dict[str, Any]
) -> None:
    file.write_bytes(content)
    for read, error in (
        (read_audit, QauditError), (read_lock, QauditError), (read_measurement, ValueError)
    ):  # fmt: skip
        with pytest.raises(error):
            read(file)
    with pytest.raises(AuditError):
        decode(ExperimentSummary, table, "summary")


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


# ------------------------------------------------- choices, answers of the Hub and tokenizers


_KEYS = st.sampled_from([
    "question", "choices", "options", "answer", "context", "label", "text", "path", "oid", "size",
    "lfs", "type", "branches", "tags", "name", "targetCommit", "ref", "sha", "siblings", "id",
])  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=5),
    max_leaves=12,
)
PARSERS = [answers.revisions_in, answers.files_in, answers.shapes_in]


@given(rows=st.lists(JSON, max_size=4))
def test_any_choices_are_read_or_refused(file: Path, rows: list[Any]) -> None:
    path = file.with_suffix(".jsonl")
    text = "\n".join(json.dumps(row) for row in rows)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(QauditError):
        read_choices(str(path))


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__name__)
@given(answer=JSON | st.lists(st.lists(JSON, min_size=3, max_size=4), max_size=3))
def test_any_answer_of_the_hub_is_parsed_or_garbled(parse: Any, answer: Any) -> None:
    with suppress(GarbledError):
        parse(answer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return {file.name: json.loads(file.read_text("utf-8")) for file in folder.glob("token*.json")}


@given(data=st.data())
def test_tokenizers_are_loaded_or_refused(
    file: Path, whole: dict[str, Any], data: st.DataObject
) -> None:
    files = copy.deepcopy(whole)
    holder: Any = files[data.draw(st.sampled_from(sorted(files)))]
    while True:
        key = data.draw(st.sampled_from(list(holder) if isinstance(holder, dict) else [0]))
        if not (isinstance(holder[key], dict | list) and holder[key]) or data.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = data.draw(JSON)
    for name, contents in files.items():
        text = json.dumps(contents)
        (file.parent / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(QauditError):
        tokenizer = load_tokenizer(file.parent)
        Cutter(tokenizer, Protocol(context=8)).encode(Document("d", "a b c"))
