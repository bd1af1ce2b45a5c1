"""For any input the readers of choices, tokenizers and Hub answers end in words."""

from __future__ import annotations

import copy
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.errors import QauditError
from qaudit.hub import answers
from qaudit.hub.answers import GarbledError
from qaudit.text.documents import read_choices
from qaudit.text.tokenizer import Cutter, load_tokenizer
from qaudit.types import Document, Protocol
from tests.support.models import save_tokenizer

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
def test_any_choices_are_read_or_refused(rows: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "choices.jsonl"
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
def test_any_tokenizer_is_loaded_or_refused(whole: dict[str, Any], data: st.DataObject) -> None:
    files = copy.deepcopy(whole)
    holder: Any = files[data.draw(st.sampled_from(sorted(files)))]
    while True:
        key = data.draw(st.sampled_from(list(holder) if isinstance(holder, dict) else [0]))
        if not (isinstance(holder[key], dict | list) and holder[key]) or data.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = data.draw(JSON)
    with tempfile.TemporaryDirectory() as folder:
        for name, contents in files.items():
            text = json.dumps(contents)
            (Path(folder) / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        with suppress(QauditError):
            tokenizer = load_tokenizer(Path(folder))
            Cutter(tokenizer, Protocol(context=8)).encode(Document("d", "a b c"))
