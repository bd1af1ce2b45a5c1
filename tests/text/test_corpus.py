"""Documents into windows: every token scored once, every byte counted once, nothing silent."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qaudit.errors import CorpusError, SourceError
from qaudit.text.corpus import POOL, build_corpus
from qaudit.text.tokenizer import cuts, load_tokenizer, owned_nbytes
from qaudit.types import Corpus, Document, Protocol
from tests.support.filled import filled
from tests.support.texts import BYTES, OWN_BOS, TEXTS, WORDS


def documents(*texts: str, name: str = "d") -> list[Document]:
    return [Document(f"{name}{k}", text) for k, text in enumerate(texts)]


CALIBRATION = documents("calibration text one", "calibration text two", name="c")


def build(
    evaluation: list[Document],
    *,
    calibration: list[Document] | Iterator[Document] | None = None,
    tokenizer: Any = BYTES,
    **protocol: Any,
) -> Corpus:
    protocol = {"context": 8, **protocol}
    fed = CALIBRATION if calibration is None else calibration
    return build_corpus(fed, evaluation, tokenizer, Protocol(**protocol))


def encode(text: str) -> list[int]:
    return BYTES(text, add_special_tokens=False, verbose=False)["input_ids"]


# -------------------------------------------------------------------------------------- windows


@given(st.integers(0, 200), st.integers(2, 40), st.integers(1, 3))
def test_windows_leave_out_the_first_token_of_each(
    length: int, context: int, unscored: int
) -> None:
    scored = [
        position
        for start, stop, scored_from in cuts(length, context, unscored)
        for position in range(start + scored_from, stop)
    ]
    inside = (position for position in range(length) if position % context)
    assert scored == [position for position in inside if position >= min(unscored, context)]


def test_a_long_document_is_cut_in_order() -> None:
    text = TEXTS[0]
    corpus = build(documents(text, "the cat"), context=8)
    tokens = encode(text)
    windows = [w for w in corpus.evaluation if w.document == 0]
    assert [w.tokens.tolist() for w in windows] == [
        tokens[k : k + 8] for k in range(0, len(tokens), 8) if len(tokens) - k > 1
    ]
    assert {w.scored_from for w in windows} == {1}


def test_calibration_windows_never_overlap() -> None:
    corpus = build(documents(*TEXTS), calibration=documents("the mat " * 9), context=8)
    fed = np.concatenate([w.tokens for w in corpus.calibration]).tolist()
    assert fed == encode("the mat " * 9)[: len(fed)]


def test_document_tokens_cap_every_document() -> None:
    fed = documents("one of them", "two of them", name="c")
    corpus = build(documents(*TEXTS), calibration=fed, context=64, document_tokens=3)
    assert [len(w.tokens) for w in corpus.evaluation] == [3, 3]
    assert [len(w.tokens) for w in corpus.calibration] == [3, 3]


# ---------------------------------------------------------------------------------------- bytes


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=60), st.sampled_from([8, 512]))
def test_scored_bytes_are_those_of_the_scored_text(text: str, context: int) -> None:
    other = Document("other", "the cat sat")
    corpus = build([Document("d", text), other], bos="always", context=context)
    found = {d.name: d.nbytes for d in corpus.documents}
    if context == 512:  # one window: with a token before it, all of the text is scored
        assert found["d"] == len(text.encode())
    else:
        assert found["d"] <= len(text.encode())


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=2, max_size=60))
def test_without_a_token_before_it_the_first_token_s_bytes_do_not_count(text: str) -> None:
    encoded = BYTES(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if len(encoded["input_ids"]) < 2:
        return
    corpus = build(
        [Document("d", text), Document("other", "the cat sat")], context=512, bos="never"
    )
    end = encoded["offset_mapping"][0][1]
    assert corpus.documents[0].nbytes == len(text[end:].encode())


def test_windows_side_by_side_count_the_bytes_they_score() -> None:
    # Single bytes: each token is one byte, and every eighth is the first of its window.
    text = "zqxjkvwpzqxjkvwpzqxj"
    assert len(encode(text)) == len(text)
    corpus = build(documents(text, "zq"), context=8)
    assert corpus.documents[0].nbytes == len(text) - 3


@pytest.mark.parametrize(
    ("text", "ends", "nbytes"),
    [
        ("a  bb  a ", [1, 5, 8], [1, 4, 3]),  # spaces that a tokenizer drops
        ("\U0001f600x", [1, 1, 1, 2], [4, 0, 0, 1]),  # a character that is split
        ("abc", [], []),
    ],
)
def test_every_byte_is_owned_once(text: str, ends: list[int], nbytes: list[int]) -> None:
    assert owned_nbytes(text, ends).tolist() == nbytes


# ------------------------------------------------------------------------------------------ BOS


def starts(corpus: Corpus) -> list[int]:
    return [int(w.tokens[0]) for w in corpus.evaluation]


@pytest.mark.parametrize(
    ("tokenizer", "bos", "expected"),
    [
        (BYTES, "auto", False),
        (BYTES, "always", True),
        (OWN_BOS, "auto", True),
        (OWN_BOS, "always", True),
        (OWN_BOS, "never", False),
    ],
)
def test_bos_stands_where_the_policy_says(tokenizer: Any, bos: str, expected: bool) -> None:
    corpus = build(documents("the cat", "the dog"), tokenizer=tokenizer, bos=bos, context=64)
    assert [start == 0 for start in starts(corpus)] == [expected] * 2
    assert corpus.evaluation[0].tokens.tolist() == [0] * expected + encode("the cat")
    assert any(note.startswith(f"bos={bos}: ") for note in corpus.notes)


def test_bos_stands_once_before_a_document_of_many_windows() -> None:
    corpus = build(documents(*TEXTS), bos="always")
    assert [w.tokens.tolist().count(0) for w in corpus.evaluation if w.document == 0][:2] == [1, 0]


# --------------------------------------------------------------------------------------- packed


def test_packed_windows_are_units_of_their_own() -> None:
    corpus = build(documents(*TEXTS), context=8, packed=True)
    tokens = [t for text in TEXTS for t in encode(text)]
    assert [w.tokens.tolist() for w in corpus.evaluation] == [
        tokens[k : k + 8] for k in range(0, len(tokens) - 7, 8)
    ]
    assert [d.name for d in corpus.documents][:2] == ["window 0", "window 1"]
    assert len({d.sha256 for d in corpus.documents}) == len(corpus.documents)
    assert [w.document for w in corpus.evaluation] == list(range(len(corpus.documents)))


# ------------------------------------------------------------------------------ which documents


def many(count: int, name: str = "m") -> list[Document]:
    return [Document(f"{name}{k}", f"{name} document number {k}") for k in range(count)]


def calibrated(corpus: Corpus) -> list[str]:
    return ["".join(BYTES.decode(w.tokens)) for w in corpus.calibration]


def test_no_more_documents_are_read_than_are_asked_for() -> None:
    def endless() -> Iterator[Document]:
        yield from many(3)
        raise AssertionError("read on")

    corpus = build(many(9, "e"), calibration=endless(), calibration_documents=3, context=64)
    assert len(corpus.calibration) == 3


def test_seed_zero_takes_the_first_documents() -> None:
    corpus = build(many(5, "e"), calibration=many(9), calibration_documents=4, context=64)
    assert calibrated(corpus) == [d.text for d in many(4)]


def test_another_seed_draws_other_documents_and_the_same_ones_again() -> None:
    def draw(seed: int) -> list[str]:
        fed = many(500)
        protocol = {"calibration_documents": 4, "context": 64, "calibration_seed": seed}
        return calibrated(build(many(5, "e"), calibration=fed, **protocol))

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(5)}) == 5
    pool = {d.text for d in many(POOL * 4)}
    assert set(draw(3)) <= pool
    assert len(set(draw(3))) == 4


def drawn(
    seed: int, repeats: int, fed: Iterator[Document] | list[Document], count: int = 4
) -> Corpus:
    protocol = Protocol(64, calibration_documents=count, calibration_seed=seed)
    return build_corpus(fed, many(5, "e"), BYTES, protocol, repeats=repeats)


@given(st.lists(st.sampled_from(["", "x", "the text of a document"]), min_size=0, max_size=60))
def test_a_seed_has_the_text_of_that_draw_whatever_is_left_out(kinds: list[str]) -> None:
    texts = [f"{kind} {k}" if kind else "" for k, kind in enumerate(kinds)]
    texts += [*texts[:5], *(f"document {k}" for k in range(12))]  # duplicates, and enough for 4
    pool = documents(*texts, name="c")
    protocol = {"context": 8, "calibration_documents": 3}
    scored = documents("evaluation one", "evaluation two")

    def corpus(**more: Any) -> Corpus:
        repeats = more.pop("repeats", 1)
        return build_corpus(pool, scored, BYTES, Protocol(**protocol, **more), repeats)

    together = [draw.calibration for draw in corpus(repeats=4).draws]
    alone = [corpus(calibration_seed=seed).calibration for seed in range(4)]
    for one, other in filled(zip(together, alone, strict=True)):
        assert [w.tokens.tolist() for w in one] == [w.tokens.tolist() for w in other]


def test_draws_have_no_document_in_common_and_the_same_evaluation_text() -> None:
    draws = drawn(0, POOL, many(500)).draws
    every = [text for draw in draws for text in calibrated(draw)]
    assert len(set(every)) == len(every) == POOL * 4
    assert all(draw.evaluation is draws[0].evaluation for draw in draws)
    assert len({draw.sha256 for draw in draws}) == POOL


@pytest.mark.parametrize(("documents", "gives"), [(11, 11), (3, 3), (8, 8)])
def test_too_little_text_for_so_many_draws_is_refused(documents: int, gives: int) -> None:
    with pytest.raises(CorpusError, match="3 calibration draws of 4 documents need 12") as refusal:
        drawn(0, 3, many(documents))
    assert f"gives {gives}" in refusal.value.message
    assert "--set repeats=N" in refusal.value.hint
    assert len(drawn(0, 3, many(12)).draws) == 3


def test_a_document_of_a_later_draw_may_not_be_evaluated_either() -> None:
    fed = [*many(4), *many(1, "e")]
    drawn(0, 1, fed)
    with pytest.raises(CorpusError, match="share 1 documents"):
        drawn(0, 2, [*fed, *many(3, "x")])


def test_what_was_left_out_is_noted() -> None:
    corpus = build(documents(*TEXTS, "", TEXTS[0]), evaluation_documents=64)
    assert "1 evaluation documents with nothing to score were left out" in corpus.notes
    assert "1 duplicate evaluation documents were left out" in corpus.notes
    assert "64 evaluation documents were requested and 2 are usable" in corpus.notes


def test_the_same_text_gives_the_same_corpus_and_another_cut_another() -> None:
    assert build(documents(*TEXTS)).sha256 == build(documents(*TEXTS)).sha256
    assert build(documents(*TEXTS)).sha256 != build(documents(*TEXTS), context=4).sha256
    assert build(documents(*TEXTS)).sha256 != build(documents(*TEXTS), bos="always").sha256


def test_a_document_keeps_its_name_and_the_hash_of_its_whole_text() -> None:
    corpus = build(documents(*TEXTS), document_tokens=3)
    assert [(d.name, d.sha256) for d in corpus.documents] == [
        (d.name, d.sha256) for d in documents(*TEXTS)
    ]


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("texts", "settings", "wrong"),
    [
        (TEXTS, {"tokenizer": WORDS, "bos": "always"}, "no BOS"),
        (TEXTS, {"packed": True, "context": 512}, "0 usable packed windows"),
        ([], {}, "0 usable documents, and 2 are needed"),
        (["the cat"], {}, "1 usable document, and 2 are needed"),
        (["the cat", ""], {}, "1 usable document, and 2 are needed"),
        (["the cat", "x", "the cat"], {}, "1 usable document, and 2 are needed"),
        (TEXTS, {"calibration": documents("", "x")}, "calibration text"),
        (TEXTS, {"context": 1}, "context"),
        (
            TEXTS,
            {"calibration": [Document("under another name", TEXTS[0]), *many(2)]},
            "calibration and evaluation share 1 documents, the first is `under another name`$",
        ),
    ],
)
def test_text_that_cannot_be_measured_is_refused(
    texts: list[str], settings: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(CorpusError, match=wrong) as caught:
        build(documents(*texts), **settings)
    assert caught.value.code == 2
    assert caught.value.hint


# ------------------------------------------------------------------------------------ tokenizer


def test_a_text_longer_than_the_model_is_cut_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").propagate = True
        build(documents(*TEXTS))
    assert caplog.records == []


@pytest.mark.parametrize(
    "raw", ["{", json.dumps({"model": {"type": "BPE"}}), json.dumps({"version": "9"})]
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, raw: str) -> None:
    BYTES.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(raw)
    with pytest.raises(SourceError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_code_beside_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    BYTES.save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config["tokenizer_class"] = "Evil"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        load_tokenizer(tmp_path)
    except SourceError as error:
        assert "is not run unless asked for" in error.message
    assert not (tmp_path / "ran").exists()
