"""Multiple-choice items under the names published sets give their fields."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from qaudit.errors import CorpusError
from qaudit.items.tokens import PromptedItem, item_text
from qaudit.text.documents import read_choices
from qaudit.types import Item
from tests.support.texts import BYTES, WORDS


def write(tmp_path: Path, *items: object) -> str:
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


ASKED = "Question: Sun?\nAnswer:"
SUN = PromptedItem("choices", "items.jsonl:1", ((ASKED, " red"), (ASKED, " yellow")), (1,))


def test_an_item_is_read_under_its_usual_names(tmp_path: Path) -> None:
    labelled = {"text": ["red", "yellow"], "label": ["1", "2"]}
    for item in (
        {"question": "Sun?", "choices": ["red", "yellow"], "answer": 1},
        {"question": "Sun?", "options": ["red", "yellow"], "answer": "B"},
        {"question": "Sun?", "choices": [" red", " yellow"], "label": "1"},
        {"question": "Sun?", "choices": labelled, "answerKey": "2"},
        {"context": ASKED, "endings": ["red", "yellow"], "gold": 1},
    ):
        assert read_choices(write(tmp_path, item)) == (SUN,)
    items = read_choices(
        write(tmp_path, *({"ctx": c, "endings": ["home", "away"], "label": 0} for c in ("He ", "")))
    )
    assert [[option for _, option in item.pairs] for item in items] == [["home", "away"]] * 2


WRONG = [
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
]  # fmt: skip


def test_a_wrong_item_is_named_by_its_line(tmp_path: Path) -> None:
    good = {"question": "q", "choices": ["a", "b"], "answer": 0}
    for item, message in WRONG:
        with pytest.raises(CorpusError) as caught:
            read_choices(write(tmp_path, good, item))
        assert message in caught.value.message
        assert "line 2" in caught.value.message
        assert caught.value.hint
    with pytest.raises(CorpusError, match="is empty"):
        read_choices(write(tmp_path))
    with pytest.raises(CorpusError, match="no text file"):
        read_choices(str(tmp_path / "none.jsonl"))


def item(context: str, *options: str) -> PromptedItem:
    return PromptedItem("choices", "i", tuple((context, option) for option in options), (0,))


def test_an_option_is_what_the_whole_has_beyond_its_context() -> None:
    def encode(text: str) -> list[int]:
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
