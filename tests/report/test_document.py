"""One document on three surfaces, and what it is made of: texts, lines, a block of a README."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len  # an independent table of widths

from qaudit.errors import UsageError
from qaudit.report import markdown
from qaudit.report.document import CodeBlock, Page, prose, words
from qaudit.report.format import BLOCKS, in_ascii, listing, padded, shortened, width_of, wrapped
from qaudit.report.markdown import BEGIN, END, put_block
from qaudit.report.series import LONGEST_LINE, sparkline, sparklines
from qaudit.report.views import View
from tests.support import sample


def test_two_harmless_pieces_of_text_make_no_link_and_a_fence_is_longer_than_any_inside():
    assert "](" not in markdown.render(Page("t", prose("`a`[x]``(javascript:y)`b`"), ()))
    assert "](" not in markdown.render(Page("t", (*words("[x]"), *words("(javascript:y)")), ()))
    text = markdown.render(Page("t", words("x"), (CodeBlock("```\n# no heading"),)))
    assert "````text\n```\n# no heading\n````" in text


# ------------------------------------------------------------------ texts

# Letters whose width is the same in every version of Unicode's tables: ASCII, accents, kana,
# ideographs, Hangul, Cyrillic, and a combining accent.
letters = st.sampled_from("ab-_ 0\u00e9\u0416\u30ab\u6f22\ud55c\uff21\u0301")
texts = st.text(letters, max_size=60)


@given(texts)
def test_widths_are_those_of_another_table(text):
    assert width_of(text) == cell_len(text)


@given(texts, st.integers(6, 40))
def test_a_shortened_text_fits_and_keeps_both_ends(text, width):
    cut = shortened(text, width)
    assert width_of(cut) <= width
    if width_of(text) <= width:
        assert cut == text
    else:
        left, dots, right = cut.partition("..")
        assert dots
        assert text.startswith(left)
        assert text.endswith(right)


@given(texts, st.integers(4, 40))
def test_wrapped_lines_fit_and_lose_no_letter(text, width):
    lines = wrapped(text, width).split("\n")
    assert all(width_of(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == "".join(text.split())


def test_padding_counts_columns_and_a_list_of_names_may_be_empty():
    assert [padded("\u6f22", 4, align) for align in "<>"] == ["\u6f22  ", "  \u6f22"]
    names = [listing(["a", "b", "c"][:k]) for k in range(4)]
    assert names == ["none", "a", "a and b", "a, b and c"]


# ------------------------------------------------------------------ lines

numbers = st.floats(-1, 1) | st.none() | st.sampled_from([float("inf"), float("nan")])


@given(st.lists(numbers, max_size=30))
def test_higher_is_never_drawn_lower(values):
    line = sparkline(values)
    assert len(line) == len(values)
    drawn = [(v, BLOCKS.index(c)) for v, c in zip(values, line, strict=True) if c != "-"]
    assert len(drawn) == sum(v is not None and abs(v) < 2 for v in values)
    drawn.sort(key=lambda pair: pair[0])  # type: ignore[arg-type, return-value]
    heights = [height for _, height in drawn]
    assert heights == sorted(heights)
    if drawn and drawn[0][0] != drawn[-1][0]:
        assert (heights[0], heights[-1]) == (0, len(BLOCKS) - 1)


def test_each_scheme_has_a_line_with_its_lowest_and_highest_error():
    assert sparkline([0.0, None, 1.0]) == f"{BLOCKS[0]}-{BLOCKS[-1]}"
    assert sparkline([0.5, 0.5]) == BLOCKS[4] * 2
    assert sparkline([None, None]) == "--"
    assert in_ascii(BLOCKS) == "_.:;=+*#"
    audit = sample.audit()
    head, *lines = sparklines(View(audit))
    assert in_ascii("\n".join((head, *lines))).isascii()
    gone = ("stage1-step1000", "gptq-4bit")
    scores = tuple(s for s in audit.measurements if (s.subject, s.scheme) != gone)
    line = sparklines(View(replace(audit, measurements=scores)))[3].split()[1]
    assert (line[0], line[1]) == (BLOCKS[0], "-")


def test_a_long_series_fits_a_line():
    head, *lines = sparklines(View(sample.many(200, 3, name="x" * 90 + "{}")))
    assert all(len(line.split()[1]) == LONGEST_LINE for line in lines)
    assert all(width_of(line) <= 80 for line in lines)
    assert ".." in head


# ------------------------------------------------------------------ a block of a README

CARD = f"{BEGIN}\n\n## A card\n\n{END}\n"
OTHER = f"{BEGIN}\n\nanother, with\n\n```sh\nqaudit scan demo\n```\n\n{END}\n"

lines = st.sampled_from(
    ["", "# A model", "text", "  ", "- a", f"`{BEGIN}`", f"see {END} here", "<!-- o -->", "| a |"]
)
newlines = st.sampled_from(["\n", "\r\n"])


@given(st.lists(lines), st.lists(lines), newlines, st.booleans())
def test_only_the_block(before, after, newline, ends):
    head = "".join(line + newline for line in before)
    tail = "".join(newline + line for line in after) + (newline if ends else "")
    old, new = (card.rstrip("\n").replace("\n", newline) for card in (OTHER, CARD))
    assert put_block(head + old + tail, CARD) == head + new + tail


@given(st.lists(lines), newlines, st.booleans())
def test_a_card_is_added_at_the_end_once(before, newline, ends):
    text = newline.join(before) + (newline if ends else "")
    once = put_block(text, CARD)
    assert once.startswith(text)
    assert once.replace("\r\n", "\n").endswith(CARD)
    assert put_block(once, CARD) == once
    assert put_block(put_block(once, OTHER), CARD) == once
    assert ("\r\n" in once) == ("\r\n" in text)
    assert "\r\r" not in once


def test_damaged_markers_are_refused():
    for text in (
        f"{BEGIN}\ntext\n",
        f"text\n{END}\n",
        f"{END}\n{BEGIN}\n",
        f"{BEGIN}\n{BEGIN}\n{END}\n",
        f"{BEGIN}\n{BEGIN}\n{END}\n{END}\n",
        f"{CARD}text\n{CARD}",
    ):
        with pytest.raises(UsageError, match="do not enclose one block") as caught:
            put_block(text, CARD)
        assert "in line 1" in caught.value.message or "in line 2" in caught.value.message
        assert BEGIN in caught.value.hint
    closing = CARD.replace(END, f"```sh\nqaudit scan\n```\n{END}")  # at an end that is not shown
    for text, card in (("```sh\na\n", CARD), ("~~~~\n~~~\n", CARD), ("```sh\na\n", closing)):
        with pytest.raises(UsageError, match="never closed"):
            put_block(text, card)


def test_what_commonmark_takes_for_no_block_and_no_open_fence_is_none():
    for text in (
        f"# How\n\n```html\n{CARD}```\n",  # an example
        f"# How\n\n~~~~html\n{CARD}~~~~\n",
        "```inline code``` on a line\n",
        "- ```sh\n  a\n\ntext\n",
        "> ```sh\n> a\n\ntext\n",
        "```sh\na\n~~~\n```\n",
        "    ```\n",
        f"text\n\n    {BEGIN}\n",
    ):
        once = put_block(text, OTHER)
        assert once == f"{text}\n{OTHER}"
        assert put_block(once, CARD) == f"{text}\n{CARD}"
    assert put_block("", CARD) == CARD
    assert put_block("\ufeff", CARD) == "\ufeff" + CARD
    assert put_block("\ufeff" + CARD, OTHER) == "\ufeff" + OTHER
