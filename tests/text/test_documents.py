"""Text and items in files: read as they stand, lazily, and refused by line where they cannot be."""

import gzip
import io
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from qaudit.errors import CorpusError, MachineError
from qaudit.items.tokens import PromptedItem, item_text
from qaudit.text.corpus import MOST_STRATA, build_corpus
from qaudit.text.documents import (
    LONGEST_STRATUM,
    part_of,
    python_documents,
    python_part,
    read_choices,
    read_documents,
    text_of,
)
from qaudit.types import Document, Item, Protocol
from tests.support.texts import BYTES, WORDS


def lines(*objects):
    return b"".join(json.dumps(o).encode() + b"\n" for o in objects)


def write(path, raw):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return str(path)


def rows(**columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


NAME_ONE = "its fields are title, body; name one as `FILE::FIELD`"


def texts(source):
    return [(d.name, d.text) for d in read_documents(source)]


def refusal(source, **how):
    with pytest.raises(CorpusError) as caught:
        list(read_documents(source, **how))
    assert caught.value.hint
    assert caught.value.code == 2
    return caught.value


def test_documents_are_plain_files_lines_of_json_and_folders_of_both(tmp_path):
    for name in ("a.txt", "a.md", "A.TXT"):
        source = write(tmp_path / name, "caf\u00e9\r\n\n two\n".encode())
        assert texts(source) == [(name, "caf\u00e9\r\n\n two\n")]
    raw = lines({"text": "one", "url": "x"}, {"text": "two\n"}) + b"\n" + lines({"text": "three"})
    for name in ("a.jsonl", "a.jsonl.gz", "c4-train.00001.json.gz", "a.json"):
        expected = [(f"{name}:1", "one"), (f"{name}:2", "two\n"), (f"{name}:4", "three")]
        assert texts(write(tmp_path / name, raw)) == expected
    # A byte order mark is no text.
    assert texts(write(tmp_path / "b.txt", b"\xef\xbb\xbfx")) == [("b.txt", "x")]
    marked = write(tmp_path / "b.jsonl", b"\xef\xbb\xbf" + lines({"content": "c", "body": "b"}))
    assert texts(marked) == [("b.jsonl:1", "c")]
    assert texts(f"{marked}::body") == [("b.jsonl:1", "b")]
    folder = tmp_path / "folder"
    write(folder / "b.txt", b"2")
    write(folder / "a" / "z.md", b"1")
    write(folder / "c.jsonl", lines({"text": "3"}, {"text": "4"}))
    write(folder / "picture.png", b"\x89PNG")
    files = ("a/z.md", "b.txt", "c.jsonl:1", "c.jsonl:2")
    assert texts(str(folder)) == [*zip(files, "1234", strict=True)]


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, raw, message in (
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
    ):
        Path(name.partition("::")[0]).write_bytes(raw)
        error = refusal(name)
        assert message in f"{error.message}; {error.hint}"
    Path("empty").mkdir()
    assert "there is no text in" in refusal("empty").message
    assert "there is no text file" in refusal(str(tmp_path / "wikitxt.jsonl")).message
    source = parquet(tmp_path / "a.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MachineError) as caught:
        texts(source)
    assert "qaudit-llm[parquet]" in caught.value.hint


def test_files_are_read_no_further_than_asked_or_they_are_python_s_own(tmp_path):
    name, documents = text_of(None, "evaluation")
    assert "evaluation part" in name
    assert "Python 3." in name
    assert {part_of(document.name) for document in documents} == {"evaluation"}
    fed = text_of(None, "calibration")[1]
    assert {part_of(document.name) for document in fed} == {"calibration", "training"}
    source = write(tmp_path / "a.txt", b"x")
    assert text_of(source, "evaluation")[0] == source
    good = lines(*({"text": f"{k}"} for k in range(3)))
    for name in ("a.jsonl", "a.jsonl.gz"):
        source = write(tmp_path / name, good + b"this is not JSON\n")
        assert [d.text for d in itertools.islice(read_documents(source), 3)] == ["0", "1", "2"]
        assert "line 4" in refusal(source).message
    whole = gzip.compress(lines(*({"text": f"{k} " * 5000} for k in range(200))))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    assert len(list(itertools.islice(read_documents(str(path)), 5))) == 5
    error = refusal(str(path))
    assert "cut short after line" in error.message
    assert error.hint == "download the file again"


# --------------------------------------------------------------------------------------------------
# The documents every Python carries, and the part each belongs to for ever.


def test_parts_never_change_and_share_no_document(monkeypatch):
    parts = [python_part(part) for part in ("evaluation", "calibration", "training")]  # type: ignore[arg-type]
    names = [d.name for part in parts for d in part]
    assert len(names) == len(set(names))
    everything = [d.name for d in python_documents()]
    assert set(names) <= set(everything)
    assert len(names) >= len(everything) - 5  # those that stand in two parts under two names
    texts = [{d.sha256 for d in part} for part in parts]
    assert not texts[0] & (texts[1] | texts[2])
    assert min(map(len, parts)) >= 64
    assert all(len(d.text) >= 400 for d in python_documents())
    first = [d.name for d in parts[0][:64]]  # not all of one package
    assert Counter(name.partition("/")[0] for name in first).most_common(1)[0][1] <= 16
    assert any(name.startswith("python-topic:") for name in first)
    assert first != sorted(first)
    # A text that stands under two names is left to evaluation.
    documents = [Document(f"d{n}", "same text") for n in range(50)]
    monkeypatch.setattr(
        "qaudit.text.documents.python_documents",
        lambda *, part: (d for d in documents if part_of(d.name) == part),
    )
    uncached = python_part.__wrapped__
    assert uncached("evaluation")
    assert uncached("calibration") == ()
    # A trained series depends on these: they were held out of its training by name.
    assert [part_of(f"python:{name}.py") for name in ("graphlib", "linecache", "site")] == [
        "evaluation"
    ] * 3
    parts = Counter(part_of(f"python:{n}") for n in range(600))
    assert parts == {"training": 382, "calibration": 116, "evaluation": 102}


# --------------------------------------------------------------------------------------------------
# Groups of documents: read from a field, refused where the field groups nothing.


def strata(source, field="source"):
    return [document.stratum for document in read_documents(source, strata=field)]


def build(names, field="source", **protocol):
    documents = [
        Document(f"d{k}", f"document number {k} of many", name) for k, name in enumerate(names)
    ]
    cut = Protocol(8, evaluation_documents=1000, **protocol)
    fed = [Document("c", "calibration text one")]
    return build_corpus(fed, documents, BYTES, cut, strata=field)


def test_a_field_groups_documents_or_is_refused(tmp_path):
    found = [{"text": "a", "source": "web"}, {"text": "b", "source": 2024}]
    assert strata(write(tmp_path / "a.jsonl", lines(*found))) == ["web", "2024"]
    write(tmp_path / "b.jsonl", lines({"text": "b", "source": "code"}))
    assert strata(str(tmp_path)) == ["web", "2024", "code"]
    columns = {"text": ["a", "b", "c"], "source": ["web", "code", "web"]}
    source = parquet(tmp_path / "a.parquet", **columns)
    assert strata(source) == ["web", "code", "web"]
    assert strata(source, "text") == ["a", "b", "c"]
    for value, wrong in (
        *((value, MISSING) for value in (None, "")),
        *((value, NO_NAME) for value in (0.5, ["web"], {}, "a\nb", "\ud800")),
        ("x" * (LONGEST_STRATUM + 1), NO_NAME),
    ):
        found = [{"text": "a", "source": "web"}, {"text": "b", "source": value}]
        error = refusal(write(tmp_path / "a.jsonl", lines(*found)), strata="source")
        assert "line 2 of" in error.message
        assert wrong in error.message
    other = lines({"text": "a", "source": "web"}, {"text": "b", "origin": "web"})
    error = refusal(write(tmp_path / "a.jsonl", other), strata="source")
    assert "line 2 of" in error.message
    assert "its fields are text, origin;" in error.hint
    source = parquet(tmp_path / "a.parquet", text=["a"])
    assert refusal(source, strata="source").hint.startswith("its fields are text;")
    source = write(tmp_path / "a.txt", b"words")
    assert "--evaluation" in refusal(source, strata="source").hint
    with pytest.raises(CorpusError, match="the text that Python carries"):
        text_of(None, "evaluation", strata="source")


MISSING, NO_NAME = "has no value of the field `source`", "no name that documents can be grouped by"


def test_groups_change_no_identity_and_what_limits_them_is_refused_or_noted():
    grouped, other = build(["a", "b", "a", "b"]), build(["a", "a", "b", "b"])
    assert grouped.strata == ("a", "b", "a", "b")
    assert build(["", "", "", ""], None).strata == ()
    assert grouped.sha256 == other.sha256 == build(["", "", "", ""], None).sha256
    names = [f"{k}" for k in range(MOST_STRATA + 1)]
    assert len(set(build(names[1:] * 2).strata)) == MOST_STRATA
    with pytest.raises(CorpusError, match=f"{MOST_STRATA + 1} values in {2 * len(names)}"):
        build(names * 2)
    assert not [note for note in build(["a", "a", "b", "b"]).notes if "`" in note]
    notes = build(["a", "a", "a", "b"]).notes
    assert "1 of 2 strata have one document, and no interval" in notes
    assert any("all evaluation documents have the value `a`" in n for n in build(["a"] * 4).notes)


ASKED = "Question: Sun?\nAnswer:"
SUN = PromptedItem("choices", "items.jsonl:1", ((ASKED, " red"), (ASKED, " yellow")), (1,))


def test_items_are_read_under_usual_names_or_named_by_their_line(tmp_path):
    path = tmp_path / "items.jsonl"
    for item in (
        {"question": "Sun?", "choices": ["red", "yellow"], "answer": 1},
        {"question": "Sun?", "options": ["red", "yellow"], "answer": "B"},
        {"question": "Sun?", "choices": [" red", " yellow"], "label": "1"},
        {"question": "Sun?", "choices": ["red", "yellow"], "answerKey": "B"},
        {"context": ASKED, "endings": ["red", "yellow"], "gold": 1},
    ):
        assert read_choices(write(path, lines(item))) == (SUN,)
    both = ({"ctx": c, "endings": ["home", "away"], "label": 0} for c in ("He ", ""))
    items = read_choices(write(path, lines(*both)))
    assert [[option for _, option in item.pairs] for item in items] == [["home", "away"]] * 2
    path = tmp_path / "items.jsonl"
    good = {"question": "q", "choices": ["a", "b"], "answer": 0}
    for item, message in (
        ({"choices": ["a", "b"], "answer": 0}, "has no `context` or `ctx` or `question`"),
        ({"question": "q", "answer": 0}, "has no `choices`"),
        ({"question": "q", "choices": ["a", "b"]}, "has no `answer`"),
        ({"question": 3, "choices": ["a", "b"], "answer": 0}, "`question` in line 2"),
        *(({"question": "q", "choices": found, "answer": 0}, "not a list of texts")
          for found in ("ab", ["a", ""])),
        ({"question": "q", "choices": ["a"], "answer": 0}, "has 1 options, and 2 are needed"),
        *(({"question": "q", "choices": ["a", "b"], "answer": answer}, f"is `{answer}`")
          for answer in ("C", True, -1)),
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "is `2`, which is none of 2"),
    ):  # fmt: skip
        with pytest.raises(CorpusError) as caught:
            read_choices(write(path, lines(good, item)))
        assert message in caught.value.message
        assert "line 2" in caught.value.message
        assert caught.value.hint
    with pytest.raises(CorpusError, match="is empty"):
        read_choices(write(path, b""))
    with pytest.raises(CorpusError, match="no text file"):
        read_choices(str(tmp_path / "none.jsonl"))


def item(context, *options):
    return PromptedItem("choices", "i", tuple((context, option) for option in options), (0,))


def test_an_option_is_what_the_whole_has_beyond_its_context():
    def encode(text):
        return BYTES(text, add_special_tokens=False, verbose=False)["input_ids"]

    options = (" the mat", " the dog", "\u00e9")
    contexts = ("the cat sat on", "the cat sat on ", "the cat")
    for context, most in itertools.product(contexts, (64, 2)):
        text = item_text(BYTES, [item(context, *options)], most)
        assert text.items == (Item("choices", "i", 3, (0,)),)
        before = encode(context.rstrip())
        for window, option in zip(text.windows, options, strict=True):
            whole = encode(context + option)
            assert window.tokens.tolist() == whole[-most - 1 :]  # the last is never read
            assert window.tokens.tolist()[window.scored_from :] == whole[len(before) :][-most:]
        assert any("lost the beginning" in note for note in text.notes) == (most == 2)
    window, _ = item_text(BYTES, [item("", "the mat", "the dog")], 64).windows
    assert (window.tokens.tolist(), window.scored_from) == ([0, *encode("the mat")], 1)
    for context, option, wrong in (
        ("", "a", "neither BOS nor EOS"),
        ("a", " ", "option ` ` has no token of its own"),
    ):
        with pytest.raises(CorpusError, match=wrong):
            item_text(WORDS, [item(context, option)], 64)
