"""Groups of evaluation documents: read from a field, refused where the field groups nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from qaudit.errors import CorpusError
from qaudit.text.corpus import MOST_STRATA, build_corpus
from qaudit.text.documents import LONGEST_STRATUM, read_documents, text_of
from qaudit.types import Corpus, Document, Protocol
from tests.support.texts import BYTES

CALIBRATION = [Document("c", "calibration text one")]


def write(path: Path, *objects: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in objects), encoding="utf-8")
    return str(path)


def strata(source: str, field: str = "source") -> list[str]:
    return [document.stratum for document in read_documents(source, strata=field)]


def refusal(source: str, field: str = "source") -> CorpusError:
    with pytest.raises(CorpusError) as caught:
        strata(source, field)
    assert caught.value.hint
    assert caught.value.code == 2
    return caught.value


def build(names: list[str], field: str | None = "source", **protocol: Any) -> Corpus:
    documents = [
        Document(f"d{k}", f"document number {k} of many", name) for k, name in enumerate(names)
    ]
    cut = Protocol(8, evaluation_documents=1000, **protocol)
    return build_corpus(CALIBRATION, documents, BYTES, cut, strata=field)


# ---------------------------------------------------------------------------------------- reading


def test_a_field_of_json_lines_groups_documents(tmp_path: Path) -> None:
    lines = [{"text": "a", "source": "web"}, {"text": "b", "source": 2024}]
    assert strata(write(tmp_path / "a.jsonl", *lines)) == ["web", "2024"]


def test_a_column_of_parquet_groups_documents(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", "b", "c"], "source": ["web", "code", "web"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert strata(str(tmp_path / "a.parquet")) == ["web", "code", "web"]
    assert strata(str(tmp_path / "a.parquet"), "text") == ["a", "b", "c"]


def test_documents_of_a_folder_keep_their_groups(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"text": "a", "source": "web"})
    write(tmp_path / "b.jsonl", {"text": "b", "source": "code"})
    assert strata(str(tmp_path)) == ["web", "code"]


MISSING, NO_NAME = "has no value of the field `source`", "no name that documents can be grouped by"


@pytest.mark.parametrize(
    ("second", "wrong"),
    [
        *(({"source": value}, MISSING) for value in (None, "")),
        *(({"source": value}, NO_NAME) for value in (0.5, ["web"], {}, "a\nb", "\ud800")),
        ({"source": "x" * (LONGEST_STRATUM + 1)}, NO_NAME),
        ({"origin": "web"}, "its fields are text, origin;"),
    ],
)
def test_a_value_that_names_no_group_is_refused(
    tmp_path: Path, second: dict[str, object], wrong: str
) -> None:
    lines = [{"text": "a", "source": "web"}, {"text": "b", **second}]
    error = refusal(write(tmp_path / "a.jsonl", *lines))
    assert "line 2 of" in error.message
    assert wrong in f"{error.message}; {error.hint}"


def test_text_without_the_field_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    assert refusal(str(tmp_path / "a.parquet")).hint.startswith("its fields are text;")
    (tmp_path / "a.txt").write_text("words", encoding="utf-8")
    assert "--evaluation" in refusal(str(tmp_path / "a.txt")).hint
    with pytest.raises(CorpusError, match="the text that Python carries"):
        text_of(None, "evaluation", strata="source")


# --------------------------------------------------------------------------------------- grouping


def test_groups_change_no_identity() -> None:
    grouped, other = build(["a", "b", "a", "b"]), build(["a", "a", "b", "b"])
    assert grouped.strata == ("a", "b", "a", "b")
    assert build(["", "", "", ""], None).strata == ()
    assert grouped.sha256 == other.sha256 == build(["", "", "", ""], None).sha256


def test_too_many_groups_are_refused() -> None:
    names = [f"{k}" for k in range(MOST_STRATA + 1)]
    assert len(set(build(names[1:] * 2).strata)) == MOST_STRATA
    with pytest.raises(CorpusError, match=f"{MOST_STRATA + 1} values in {2 * len(names)}"):
        build(names * 2)


def test_what_limits_a_group_is_noted() -> None:
    assert not [note for note in build(["a", "a", "b", "b"]).notes if "`" in note]
    notes = build(["a", "a", "a", "b"]).notes
    assert "1 of 2 strata have one document, and no interval" in notes
    assert any("all evaluation documents have the value `a`" in n for n in build(["a"] * 4).notes)
