"""Text in files: read as it stands, lazily, and refused by line where it cannot be read."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from qaudit.errors import CorpusError, MachineError
from qaudit.text.documents import part_of, read_documents, text_of


def lines(*objects: object) -> bytes:
    return b"".join(json.dumps(o).encode() + b"\n" for o in objects)


def write(path: Path, raw: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def parquet(path: Path, **columns: list) -> str:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return str(path)


def rows(**columns: list) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


NAME_ONE = "its fields are title, body; name one as `FILE::FIELD`"


def texts(source: str) -> list[tuple[str, str]]:
    return [(d.name, d.text) for d in read_documents(source)]


def refusal(source: str) -> CorpusError:
    with pytest.raises(CorpusError) as caught:
        texts(source)
    assert caught.value.hint
    assert caught.value.code == 2
    return caught.value


@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.TXT"])
def test_a_plain_file_is_one_document(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, "caf\u00e9\r\n\n two\n".encode())
    assert texts(source) == [(name, "caf\u00e9\r\n\n two\n")]


def test_a_folder_is_all_its_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", b"2")
    write(tmp_path / "a" / "z.md", b"1")
    write(tmp_path / "c.jsonl", lines({"text": "3"}, {"text": "4"}))
    write(tmp_path / "picture.png", b"\x89PNG")
    assert texts(str(tmp_path)) == [
        ("a/z.md", "1"),
        ("b.txt", "2"),
        ("c.jsonl:1", "3"),
        ("c.jsonl:2", "4"),
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "c4-train.00001.json.gz", "a.json"])
def test_a_line_of_json_is_a_document(tmp_path: Path, name: str) -> None:
    raw = lines({"text": "one", "url": "x"}, {"text": "two\n"}) + b"\n" + lines({"text": "three"})
    source = write(tmp_path / name, raw)
    assert texts(source) == [(f"{name}:1", "one"), (f"{name}:2", "two\n"), (f"{name}:4", "three")]


def test_a_field_is_found_by_its_usual_name_or_by_the_one_given(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", lines({"content": "c", "body": "b"}))
    assert texts(source) == [("a.jsonl:1", "c")]
    assert texts(f"{source}::body") == [("a.jsonl:1", "b")]


def test_text_in_front_of_a_byte_order_mark_is_kept(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfx")) == [("a.txt", "x")]
    assert texts(write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + lines({"text": "y"}))) == [
        ("a.jsonl:1", "y")
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_what_is_not_asked_for_is_not_read(tmp_path: Path, name: str) -> None:
    good = lines(*({"text": f"{k}"} for k in range(3)))
    source = write(tmp_path / name, good + b"this is not JSON\n")
    assert [d.text for d in itertools.islice(read_documents(source), 3)] == ["0", "1", "2"]
    assert "line 4" in refusal(source).message


def test_a_file_cut_short_gives_what_came_before(tmp_path: Path) -> None:
    whole = gzip.compress(lines(*({"text": f"{k} " * 5000} for k in range(200))))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    assert len(list(itertools.islice(read_documents(str(path)), 5))) == 5
    error = refusal(str(path))
    assert "cut short after line" in error.message
    assert error.hint == "download the file again"


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("a.jsonl.gz", b"<html>not found</html>", "is damaged"),
        ("a.jsonl", lines({"text": "x"}) + b"{", "line 2 of `a.jsonl` is not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 of `a.jsonl` is not JSON"),
        ("a.jsonl", lines(["text"]), "line 1 of `a.jsonl` is a list and not an object"),
        ("a.jsonl", lines({"text": 3}), "in line 1 of `a.jsonl` is not a text"),
        ("a.jsonl", lines({"title": "x"}), "line 1 of `a.jsonl` has no field `text` or `content`"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 of `a.jsonl` holds half a character"),
        ("a.jsonl", lines({"text": "x"}) + b'{"text": "\xff"}', "line 2 of `a.jsonl` is not UTF-8"),
        ("a.txt", b"one\ntwo\nthr\xffee", "line 3 of `a.txt` is not UTF-8"),
        ("a.txt", b"", "`a.txt` is empty"),
        ("a.jsonl", b"\n \n", "`a.jsonl` is empty"),
        ("a.pdf", b"%PDF", "`a.pdf` is not text that can be read"),
        ("a.parquet", b"PAR", "`a.parquet` cannot be read as Parquet"),
        ("a.parquet", rows(text=["one", None]), "row 2"),
        ("a.parquet", rows(title=["x"]), "its fields are title;"),
        ("a.txt::body", b"x", "no field `body`"),
        ("a.jsonl::text", lines({"title": "x", "body": "y"}), NAME_ONE),
        ("nothing/..", b"", "there is no text in"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, raw: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(name.partition("::")[0])
    file.parent.mkdir(exist_ok=True)
    if not file.is_dir():
        file.write_bytes(raw)
    error = refusal(name)
    assert message in f"{error.message}; {error.hint}"


def test_a_file_that_is_not_there_is_refused_with_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "wikitext.jsonl", b"")
    error = refusal(str(tmp_path / "wikitxt.jsonl"))
    assert "there is no text file" in error.message
    assert error.hint == "did you mean `wikitext.jsonl`?"


def test_parquet_without_its_library_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = parquet(tmp_path / "a.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MachineError) as caught:
        texts(source)
    assert "qaudit-llm[parquet]" in caught.value.hint


def test_without_a_source_the_text_is_python_s_own(tmp_path: Path) -> None:
    name, documents = text_of(None, "evaluation")
    assert "evaluation part" in name
    assert "Python 3." in name
    assert {part_of(document.name) for document in documents} == {"evaluation"}
    fed = text_of(None, "calibration")[1]
    assert {part_of(document.name) for document in fed} == {"calibration", "training"}
    source = write(tmp_path / "a.txt", b"x")
    assert text_of(source, "evaluation")[0] == source
