"""Documents into windows: every token scored once, every byte counted once, nothing silent."""

import json
import logging
import random
from collections import Counter
from string import ascii_lowercase

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qaudit.errors import CorpusError, SourceError
from qaudit.text import corpus as corpus_module
from qaudit.text.corpus import POOL, SKETCH, NearCopies, build_corpus
from qaudit.text.tokenizer import cuts, load_tokenizer, owned_nbytes
from qaudit.types import Document, Protocol
from tests.support.filled import filled
from tests.support.texts import BYTES, OWN_BOS, TEXTS, WORDS


def documents(*texts, name="d"):
    return [Document(f"{name}{k}", text) for k, text in enumerate(texts)]


CALIBRATION = documents("calibration text one", "calibration text two", name="c")


def build(evaluation, *, calibration=None, tokenizer=BYTES, **protocol):
    protocol = {"context": 8, **protocol}
    fed = CALIBRATION if calibration is None else calibration
    return build_corpus(fed, evaluation, tokenizer, Protocol(**protocol))


def encode(text):
    return BYTES(text, add_special_tokens=False, verbose=False)["input_ids"]


@given(st.integers(0, 200), st.integers(2, 40), st.integers(1, 3))
def test_windows_leave_out_their_first_token(length, context, unscored):
    scored = [
        position
        for start, stop, scored_from in cuts(length, context, unscored)
        for position in range(start + scored_from, stop)
    ]
    inside = (position for position in range(length) if position % context)
    assert scored == [position for position in inside if position >= min(unscored, context)]


def test_long_documents_are_cut_in_order_calibration_too_and_capped_ones_keep_their_name():
    fed = "the mat " * 9
    corpus = build(documents(TEXTS[0], "the cat"), calibration=documents(fed), context=8)
    tokens = encode(TEXTS[0])
    windows = [w for w in corpus.evaluation if w.document == 0]
    assert [w.tokens.tolist() for w in windows] == [
        tokens[k : k + 8] for k in range(0, len(tokens), 8) if len(tokens) - k > 1
    ]
    assert {w.scored_from for w in windows} == {1}
    found = np.concatenate([w.tokens for w in corpus.calibration]).tolist()
    assert found == encode(fed)[: len(found)]
    few = documents("one of them", "two of them", name="c")
    corpus = build(documents(*TEXTS), calibration=few, context=64, document_tokens=3)
    assert [len(w.tokens) for w in (*corpus.evaluation, *corpus.calibration)] == [3] * 4
    assert [(d.name, d.sha256) for d in corpus.documents] == [
        (d.name, d.sha256) for d in documents(*TEXTS)
    ]


# ---------------------------------------------------------------------------------------- bytes


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=60), st.sampled_from([8, 512]))
def test_scored_bytes_are_those_of_the_scored_text(text, context):
    other = Document("other", "the cat sat")
    corpus = build([Document("d", text), other], bos="always", context=context)
    found = {d.name: d.nbytes for d in corpus.documents}
    if context == 512:  # one window: with a token before it, all of the text is scored
        assert found["d"] == len(text.encode())
    else:
        assert found["d"] <= len(text.encode())


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=2, max_size=60))
def test_without_a_token_before_it_the_first_token_s_bytes_do_not_count(text):
    encoded = BYTES(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if len(encoded["input_ids"]) < 2:
        return
    corpus = build([*documents(text), *documents("the cat sat")], context=512, bos="never")
    end = encoded["offset_mapping"][0][1]
    assert corpus.documents[0].nbytes == len(text[end:].encode())


def test_windows_side_by_side_count_the_bytes_they_score_and_every_byte_is_owned_once():
    # Single bytes: each token is one byte, and every eighth is the first of its window.
    text = "zqxjkvwpzqxjkvwpzqxj"
    assert len(encode(text)) == len(text)
    corpus = build(documents(text, "zq"), context=8)
    assert corpus.documents[0].nbytes == len(text) - 3
    for text, ends, nbytes in (
        ("a  bb  a ", [1, 5, 8], [1, 4, 3]),  # spaces that a tokenizer drops
        ("\U0001f600x", [1, 1, 1, 2], [4, 0, 0, 1]),  # a character that is split
        ("abc", [], []),
    ):
        assert owned_nbytes(text, ends).tolist() == nbytes


def test_bos_stands_where_the_policy_says_and_packed_windows_are_units():
    for tokenizer, bos, expected in (
        (BYTES, "auto", False),
        (BYTES, "always", True),
        (OWN_BOS, "auto", True),
        (OWN_BOS, "always", True),
        (OWN_BOS, "never", False),
    ):
        corpus = build(documents("the cat", "the dog"), tokenizer=tokenizer, bos=bos, context=64)
        assert [int(w.tokens[0]) == 0 for w in corpus.evaluation] == [expected] * 2
        assert corpus.evaluation[0].tokens.tolist() == [0] * expected + encode("the cat")
        assert any(note.startswith(f"bos={bos}: ") for note in corpus.notes)
    corpus = build(documents(*TEXTS), bos="always")  # once before a document of many windows
    assert [w.tokens.tolist().count(0) for w in corpus.evaluation if w.document == 0][:2] == [1, 0]
    corpus = build(documents(*TEXTS), context=8, packed=True)
    tokens = [t for text in TEXTS for t in encode(text)]
    assert [w.tokens.tolist() for w in corpus.evaluation] == [
        tokens[k : k + 8] for k in range(0, len(tokens) - 7, 8)
    ]
    assert [d.name for d in corpus.documents][:2] == ["window 0", "window 1"]
    assert len({d.sha256 for d in corpus.documents}) == len(corpus.documents)
    assert [w.document for w in corpus.evaluation] == list(range(len(corpus.documents)))


# ------------------------------------------------------------------------------ which documents


def many(count, name="m"):
    return [Document(f"{name}{k}", f"{name} document number {k}") for k in range(count)]


def calibrated(corpus):
    return ["".join(BYTES.decode(w.tokens)) for w in corpus.calibration]


def test_few_documents_are_read_without_warning(caplog):
    def endless():
        yield from many(4)
        raise AssertionError("read on")

    corpus = build(many(9, "e"), calibration=endless(), calibration_documents=4, context=64)
    assert calibrated(corpus) == [d.text for d in many(4)]

    def draw(seed):
        protocol = {"calibration_documents": 4, "context": 64, "calibration_seed": seed}
        return calibrated(build(many(5, "e"), calibration=many(500), **protocol))

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(5)}) == 5
    pool = {d.text for d in many(POOL * 4)}
    assert set(draw(3)) <= pool
    assert len(set(draw(3))) == 4
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").propagate = True
        build(documents(*TEXTS))
    assert caplog.records == []


def drawn(seed, repeats, fed):
    protocol = Protocol(64, calibration_documents=4, calibration_seed=seed)
    return build_corpus(fed, many(5, "e"), BYTES, protocol, repeats=repeats)


@given(st.lists(st.sampled_from(["", "x", "the text of a document"]), min_size=0, max_size=60))
def test_a_seed_has_the_text_of_that_draw_whatever_is_left_out(kinds):
    texts = [f"{kind} {k}" if kind else "" for k, kind in enumerate(kinds)]
    texts += [*texts[:5], *(f"document {k}" for k in range(12))]  # duplicates, and enough for 4
    pool = documents(*texts, name="c")
    protocol = {"context": 8, "calibration_documents": 3}
    scored = documents("evaluation one", "evaluation two")

    def corpus(**more):
        repeats = more.pop("repeats", 1)
        return build_corpus(pool, scored, BYTES, Protocol(**protocol, **more), repeats)

    together = [draw.calibration for draw in corpus(repeats=4).draws]
    alone = [corpus(calibration_seed=seed).calibration for seed in range(4)]
    for one, other in filled(zip(together, alone, strict=True)):
        assert [w.tokens.tolist() for w in one] == [w.tokens.tolist() for w in other]


def test_draws_have_no_document_in_common_and_too_little_text_for_them_is_refused():
    draws = drawn(0, POOL, many(500)).draws
    every = [text for draw in draws for text in calibrated(draw)]
    assert len(set(every)) == len(every) == POOL * 4
    assert all(draw.evaluation is draws[0].evaluation for draw in draws)
    assert len({draw.sha256 for draw in draws}) == POOL
    for count in (11, 3, 8):
        with pytest.raises(CorpusError, match="3 calibration draws of 4 documents need 12") as no:
            drawn(0, 3, many(count))
        assert f"gives {count}" in no.value.message
        assert "--set repeats=N" in no.value.hint
    assert len(drawn(0, 3, many(12)).draws) == 3
    fed = [*many(4), *many(1, "e")]
    drawn(0, 1, fed)
    with pytest.raises(CorpusError, match="share 1 documents"):  # a later draw, too
        drawn(0, 2, [*fed, *many(3, "x")])


def test_text_that_cannot_be_measured_is_refused_or_left_out_with_a_note():
    renamed = [Document("under another name", TEXTS[0]), *many(2)]
    shared = "calibration and evaluation share 1 documents, the first is `under another name`$"
    for texts, changes, wrong in (
        (TEXTS, {"tokenizer": WORDS, "bos": "always"}, "no BOS"),
        (TEXTS, {"packed": True, "context": 512}, "0 usable packed windows"),
        ([], {}, "0 usable documents, and 2 are needed"),
        *((few, {}, "1 usable document, and 2 are needed")
          for few in (["the cat"], ["the cat", ""], ["the cat", "x", "the cat"])),
        (TEXTS, {"calibration": documents("", "x")}, "calibration text"),
        (TEXTS, {"context": 1}, "context"),
        (TEXTS, {"calibration": renamed}, shared),
    ):  # fmt: skip
        with pytest.raises(CorpusError, match=wrong) as caught:
            build(documents(*texts), **changes)
        assert caught.value.code == 2
        assert caught.value.hint
    corpus = build(documents(*TEXTS, "", TEXTS[0]), evaluation_documents=64)
    assert "1 evaluation documents with nothing to score were left out" in corpus.notes
    assert "1 duplicate evaluation documents were left out" in corpus.notes
    assert "64 evaluation documents were requested and 2 are usable" in corpus.notes
    assert build(documents(*TEXTS)).sha256 == build(documents(*TEXTS)).sha256
    assert build(documents(*TEXTS)).sha256 != build(documents(*TEXTS), context=4).sha256
    assert build(documents(*TEXTS)).sha256 != build(documents(*TEXTS), bos="always").sha256


def test_a_damaged_tokenizer_is_named_and_code_beside_one_is_not_run(tmp_path):
    BYTES.save_pretrained(tmp_path)
    for raw in ("{", json.dumps({"model": {"type": "BPE"}}), json.dumps({"version": "9"})):
        (tmp_path / "tokenizer.json").write_text(raw)
        with pytest.raises(SourceError, match="cannot be read"):
            load_tokenizer(tmp_path)
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


# --------------------------------------------------------------------------------------------------
# Documents with the same tokens, and documents with nearly the same.


def text(seed, words=60):
    draw = random.Random(seed)
    return " ".join("".join(draw.choices(ascii_lowercase, k=6)) for _ in range(words))


def of_words(evaluation, *, searches=False, **protocol):
    settings = {"context": 512, "calibration_documents": 2, **protocol}
    fed = [Document(f"c{k}", text(1000 + k)) for k in range(2)]
    scored = [Document(f"e{k}", words) for k, words in enumerate(evaluation)]
    return build_corpus(fed, scored, BYTES, Protocol(**settings), searches=searches)


def test_texts_that_differ_behind_the_cut_are_one_document_and_near_copies_one_unit():
    tails = [text(k % 4) + f" tail {k}" for k in range(16)]
    cut = of_words(tails, document_tokens=200)
    assert len(cut.documents) == 4
    assert "12 duplicate evaluation documents were left out" in cut.notes
    with pytest.raises(CorpusError, match="share 1 documents"):
        of_words([text(1000) + " tail", text(1), text(2)], document_tokens=200)
    texts = [text(k // 2) + (" further words" if k % 2 else "") for k in range(12)]
    cut = of_words(texts)
    assert len(cut.documents) == 6
    assert any("6 evaluation documents are near-copies of others" in note for note in cut.notes)
    assert {window.document for window in cut.evaluation} == set(range(6))
    assert len(cut.evaluation) == 12
    whole = sum(len(words.encode()) for words in texts)
    assert whole - 12 <= sum(document.nbytes for document in cut.documents) <= whole
    # No more of them are read than sixteen for each document.
    texts = [text(1), *(text(0) + f" further words {k}" for k in range(200))]
    cut = of_words(texts, evaluation_documents=4)
    assert len(cut.evaluation) == 16 * 4
    # Documents of other words and short ones stay apart.
    cut = of_words([text(k) for k in range(8)] + ["a phrase of 8", "a phrase of 9"])
    assert len(cut.documents) == 10
    assert [window.document for window in cut.evaluation] == list(range(10))
    # The copies of a copy are found by any of them.
    copies, tokens = NearCopies(), list(range(100))
    shifted = [tokens[k:] + [1000 + j for j in range(k)] for k in (0, 20, 40)]
    clusters = [copies.add(np.array(one, dtype=np.int32)) for one in shifted]
    assert clusters == [0, 0, 0]
    assert copies.count == 1


def test_a_search_reads_documents_behind_those_that_are_judged_if_it_can():
    texts = [text(k) for k in range(9)]
    copies = [texts[0] + " further words", text(1000), texts[1]]  # near, calibrated on, the same
    plain = of_words(texts[:4] + copies + texts[4:], evaluation_documents=4)
    cut = of_words(texts[:4] + copies + texts[4:], evaluation_documents=4, searches=True)
    assert [d.name for d in cut.search_documents] == ["e7", "e8", "e9", "e10"]
    assert {window.document for window in cut.search} == set(range(4))
    found = cut.of_search()
    assert (found.documents, found.evaluation) == (cut.search_documents, cut.search)
    # What subjects are measured on is the same with a search and without.
    assert (plain.sha256, plain.documents) == (cut.sha256, cut.documents)
    assert (plain.text_sha256, cut.text_sha256) == ((cut.sha256,), (cut.sha256, found.sha256))
    assert of_words([text(k) for k in range(9)], evaluation_documents=4).available == 9
    for behind, further in ((1, 0), (2, 2), (9, 4)):
        texts = [text(k) for k in range(4 + behind)]
        cut = of_words(texts, evaluation_documents=4, searches=True)
        assert len(cut.search_documents) == further
        assert cut.available == 4 + behind
        assert (cut.of_search().documents == cut.documents) == (not further)
        counted = [n for n in cut.notes if "its trials count where its soup is judged" in n]
        assert len(counted) == (not further)


def test_what_most_documents_have_is_no_work(monkeypatch):
    compared = []
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "_overlap", lambda *pair: compared.append(pair) or 0.0)
        copies, header = NearCopies(), list(range(30))
        for k in range(50):
            tokens = [*header, *range(1000 * k + 1000, 1000 * k + 1100)]
            copies.add(np.array(tokens, dtype=np.int32))
    assert (copies.count, compared) == (50, [])  # one header: a count alone tells them apart
    work = []  # documents that are looked at, one for each shingle that they share

    class Counted(Counter[int]):
        def __init__(self, numbers):
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
