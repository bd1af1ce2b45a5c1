"""Text as a stream of tokens: what is in it, what is held out of it, when it is made again."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.folder import LOG, truncate_log
from experiments.text import END, FEWEST, entries_of, prepare
from qaudit.errors import CorpusError, SourceError, UsageError
from qaudit.text.documents import part_of
from tests.support.training import read_log

SENTENCES = [f"document {n} speaks of {n * n} and of {'ab' * (n % 5)}" for n in range(60)]


def write_folder(folder, texts):
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"d{number}.txt").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    source = write_folder(root / "source", SENTENCES)
    return root, source, prepare(root / "made", sources=[source], vocabulary=300)


def documents_of(stream):
    end = stream.tokenizer.eos_token_id
    starts = np.flatnonzero(stream.tokens == end)
    parts = np.split(stream.tokens, starts[1:])
    assert stream.tokens[0] == end
    return [stream.tokenizer.decode(part[1:].tolist()) for part in parts]


def test_the_stream_is_the_documents_that_are_not_held_out(made):
    _, _, stream = made
    expected = {SENTENCES[n] for n in range(60) if part_of(f"d{n}.txt") != "evaluation"}
    found = documents_of(stream)
    assert set(found) == expected
    assert len(found) == len(expected) == stream.documents
    assert stream.documents + stream.heldout == 60
    assert stream.tokens.dtype == np.uint16
    assert stream.tokenizer.eos_token == END


def test_what_is_held_out_is_recorded_by_hash_and_can_be_evaluated_on(made):
    import hashlib

    root, _, stream = made
    lines = (root / "made/heldout.txt").read_text(encoding="utf-8").splitlines()[1:]
    texts = [
        json.loads(line)["text"]
        for line in (root / "made/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(lines) == len(texts) == stream.heldout > 3
    assert [line.split()[0] for line in lines] == [
        hashlib.sha256(text.encode()).hexdigest() for text in texts
    ]
    assert not set(texts) & set(documents_of(stream))


def test_a_held_out_text_is_trained_on_under_no_name(tmp_path):
    heldout = next(n for n in range(60) if part_of(f"d{n}.txt") == "evaluation")
    trained = next(n for n in range(60) if part_of(f"d{n}.txt") == "training")
    texts = list(SENTENCES)
    texts[trained] = texts[heldout]
    source = write_folder(tmp_path / "source", texts)
    stream = prepare(tmp_path / "made", sources=[source], vocabulary=300)
    assert SENTENCES[heldout] not in documents_of(stream)


def test_a_stream_is_made_once(made, monkeypatch):
    root, source, stream = made
    before = (root / "made/tokens.bin").stat().st_mtime_ns
    monkeypatch.setattr("experiments.text._encode", None)
    again = prepare(root / "made", sources=[source], vocabulary=300)
    assert (root / "made/tokens.bin").stat().st_mtime_ns == before
    assert (again.key, again.tokenizer_key) == (stream.key, stream.tokenizer_key)
    assert np.array_equal(again.tokens, stream.tokens)


def test_other_text_in_the_same_folder_is_refused_by_what_changed(made, tmp_path):
    root, source, _ = made
    with pytest.raises(UsageError, match="`vocabulary` was 300 and is 310"):
        prepare(root / "made", sources=[source], vocabulary=310)
    other = write_folder(tmp_path / "other", [*SENTENCES, "one more"])
    with pytest.raises(UsageError, match=r"`documents` was [0-9a-f]+ and is [0-9a-f]+"):
        prepare(root / "made", sources=[other], vocabulary=300)


def test_a_tokenizer_that_is_given_is_used_and_known_by_its_bytes(made, tmp_path):
    root, source, stream = made
    given = prepare(
        tmp_path / "made", sources=[source], vocabulary=999, tokenizer=root / "made/tokenizer"
    )
    assert np.array_equal(given.tokens, stream.tokens)
    assert given.key == stream.key  # however its tokenizer came to be
    assert entries_of(root / "made/tokenizer") == 320  # 300, made a multiple of 64


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    source = write_folder(tmp_path / "source", SENTENCES)
    with pytest.raises(UsageError, match=r"there is no `tokenizer.json`"):
        prepare(tmp_path / "made", sources=[source], vocabulary=300, tokenizer=tmp_path)


def test_of_a_few_documents_none_is_held_out(tmp_path):
    source = write_folder(tmp_path / "source", SENTENCES[: FEWEST - 1])
    stream = prepare(tmp_path / "made", sources=[source], vocabulary=300)
    assert (stream.documents, stream.heldout) == (FEWEST - 1, 0)


def test_text_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CorpusError, match="there is no text file"):
        prepare(tmp_path / "made", sources=[str(tmp_path / "none.txt")], vocabulary=300)


def test_a_text_that_broke_off_is_made_again(made, tmp_path, monkeypatch):
    _, source, stream = made
    with monkeypatch.context() as patch:
        patch.setattr(
            "experiments.text._record_heldout", None
        )  # not callable: stops before the end
        with pytest.raises(TypeError):
            prepare(tmp_path / "made", sources=[source], vocabulary=300)
    again = prepare(tmp_path / "made", sources=[source], vocabulary=300)
    assert np.array_equal(again.tokens, stream.tokens)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000, "{}", '{"wanted": {}}', "null"])
def test_a_record_that_is_none_is_named_with_what_to_remove(tmp_path, text):
    source = write_folder(tmp_path / "source", SENTENCES[:3])
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "text.json").write_text(text, encoding="utf-8")
    with pytest.raises(SourceError, match="is not the record of a text") as refused:
        prepare(tmp_path / "made", sources=[source], vocabulary=300)
    assert "remove" in refused.value.hint


@given(st.lists(st.text() | st.sampled_from(["[" * 9999, "3", "{}", '{"run": "a"}', "NaN"])))
def test_the_odd_lines_of_a_log_are_dropped(lines):
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        text = "\n".join(['{"run": "a", "step": 10}', *lines])
        (place / LOG).write_text(text, encoding="utf-8", newline="")
        truncate_log(place, "a", 10)
        assert read_log(place) == [{"run": "a", "step": 10}]
