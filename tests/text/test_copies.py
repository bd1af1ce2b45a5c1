"""Documents with the same tokens, and documents with nearly the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest

from qaudit.errors import CorpusError
from qaudit.text import corpus as corpus_module
from qaudit.text.corpus import SKETCH, NearCopies, build_corpus
from qaudit.types import Corpus, Document, Protocol
from tests.support.texts import BYTES


def text(seed: int, words: int = 60) -> str:
    draw = random.Random(seed)
    return " ".join("".join(draw.choices(ascii_lowercase, k=6)) for _ in range(words))


def corpus(evaluation: list[str], *, searches: bool = False, **protocol: Any) -> Corpus:
    settings = {"context": 512, "calibration_documents": 2, **protocol}
    fed = [Document(f"c{k}", text(1000 + k)) for k in range(2)]
    scored = [Document(f"e{k}", words) for k, words in enumerate(evaluation)]
    return build_corpus(fed, scored, BYTES, Protocol(**settings), searches=searches)


def test_texts_that_differ_behind_the_cut_are_one_document() -> None:
    tails = [text(k % 4) + f" tail {k}" for k in range(16)]
    cut = corpus(tails, document_tokens=200)
    assert len(cut.documents) == 4
    assert "12 duplicate evaluation documents were left out" in cut.notes
    with pytest.raises(CorpusError, match="share 1 documents"):
        corpus([text(1000) + " tail", text(1), text(2)], document_tokens=200)


def test_near_copies_are_one_unit() -> None:
    texts = [text(k // 2) + (" further words" if k % 2 else "") for k in range(12)]
    cut = corpus(texts)
    assert len(cut.documents) == 6
    assert any("6 evaluation documents are near-copies of others" in note for note in cut.notes)
    scored = {window.document for window in cut.evaluation}
    assert scored == set(range(6))
    assert len(cut.evaluation) == 12
    whole = sum(len(words.encode()) for words in texts)
    assert whole - 12 <= sum(document.nbytes for document in cut.documents) <= whole


def test_no_more_near_copies_are_read_than_sixteen_for_each_document() -> None:
    texts = [text(1), *(text(0) + f" further words {k}" for k in range(200))]
    cut = corpus(texts, evaluation_documents=4)
    assert len(cut.evaluation) == 16 * 4


def test_documents_of_other_words_and_short_ones_stay_apart() -> None:
    cut = corpus([text(k) for k in range(8)] + ["a phrase of 8", "a phrase of 9"])
    assert len(cut.documents) == 10
    assert [window.document for window in cut.evaluation] == list(range(10))


def test_the_copies_of_a_copy_are_found_by_any_of_them() -> None:
    copies, tokens = NearCopies(), list(range(100))
    shifted = [tokens[k:] + [1000 + j for j in range(k)] for k in (0, 20, 40)]
    clusters = [copies.add(np.array(one, dtype=np.int32)) for one in shifted]
    assert clusters == [0, 0, 0]
    assert copies.count == 1


def test_documents_of_the_text_are_counted_for_the_next_step() -> None:
    assert corpus([text(k) for k in range(9)], evaluation_documents=4).available == 9
    assert corpus([text(k) for k in range(9)]).available == 9


def test_a_search_reads_documents_behind_those_that_are_judged_and_no_copies_of_them() -> None:
    texts = [text(k) for k in range(9)]
    copies = [texts[0] + " further words", text(1000), texts[1]]  # near, calibrated on, the same
    plain = corpus(texts[:4] + copies + texts[4:], evaluation_documents=4)
    cut = corpus(texts[:4] + copies + texts[4:], evaluation_documents=4, searches=True)
    assert [d.name for d in cut.search_documents] == ["e7", "e8", "e9", "e10"]
    assert {window.document for window in cut.search} == set(range(4))
    found = cut.of_search()
    assert (found.documents, found.evaluation) == (cut.search_documents, cut.search)
    # What subjects are measured on is the same with a search and without.
    assert (plain.sha256, plain.documents) == (cut.sha256, cut.documents)
    assert (plain.text_sha256, cut.text_sha256) == ((cut.sha256,), (cut.sha256, found.sha256))


@pytest.mark.parametrize(("behind", "further"), [(1, 0), (2, 2), (9, 4)])
def test_a_search_without_half_as_many_further_documents_reads_those_that_are_judged(
    behind: int, further: int
) -> None:
    cut = corpus([text(k) for k in range(4 + behind)], evaluation_documents=4, searches=True)
    assert len(cut.search_documents) == further
    assert cut.available == 4 + behind
    assert (cut.of_search().documents == cut.documents) == (not further)
    counted = [note for note in cut.notes if "its trials count where its soup is judged" in note]
    assert len(counted) == (not further)


def test_documents_with_one_header_are_compared_by_a_count_alone(monkeypatch) -> None:
    compared: list[object] = []
    monkeypatch.setattr("qaudit.text.corpus._overlap", lambda *pair: compared.append(pair) or 0.0)
    copies, header = NearCopies(), list(range(30))
    for k in range(50):
        copies.add(np.array([*header, *range(1000 * k + 1000, 1000 * k + 1100)], dtype=np.int32))
    assert copies.count == 50
    assert not compared


def test_what_most_documents_have_is_no_work_and_copies_behind_it_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work: list[int] = []  # documents that are looked at, one for each shingle that they share

    class Counted(Counter[int]):
        def __init__(self, numbers: Iterable[int]) -> None:
            numbers = list(numbers)
            work.append(len(numbers))
            super().__init__(numbers)

    overlap = corpus_module._overlap
    monkeypatch.setattr(corpus_module, "COMMON", 10)
    monkeypatch.setattr(corpus_module, "Counter", Counted)
    monkeypatch.setattr(corpus_module, "_overlap", lambda *pair: work.append(1) or overlap(*pair))
    copies, header = NearCopies(), list(range(40))
    documents = [[*header, *range(1000 * k + 1000, 1000 * k + 1100)] for k in range(100)]
    for tokens in documents:
        copies.add(np.array(tokens, dtype=np.int32))
    assert copies.count == 100
    assert max(work) <= 10 * SKETCH
    assert sum(work[20:]) < sum(work[:20])  # a hundredth document is as much work as a twentieth
    for tokens in documents[::9]:
        copies.add(np.array([*tokens[:130], *range(10**6, 10**6 + 10)], dtype=np.int32))
    assert copies.clusters[100:] == list(range(0, 100, 9))
