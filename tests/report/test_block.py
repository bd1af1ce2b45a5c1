from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.errors import UsageError
from qaudit.report.markdown import BEGIN, END, put_block

CARD = f"{BEGIN}\n\n## A card\n\n{END}\n"
OTHER = f"{BEGIN}\n\nanother, with\n\n```sh\nqaudit scan demo\n```\n\n{END}\n"

lines = st.sampled_from(
    [
        "",
        "# A model",
        "text",
        "  ",
        "- a",
        f"`{BEGIN}`",
        f"see {END} here",
        "<!-- other -->",
        "| a |",
    ]
)
newlines = st.sampled_from(["\n", "\r\n"])


@given(st.lists(lines), st.lists(lines), newlines, st.booleans())
def test_the_block_is_replaced_and_nothing_else_is_touched(
    before: list[str], after: list[str], newline: str, ends: bool
) -> None:
    head = "".join(line + newline for line in before)
    tail = "".join(newline + line for line in after) + (newline if ends else "")
    old, new = (card.rstrip("\n").replace("\n", newline) for card in (OTHER, CARD))
    assert put_block(head + old + tail, CARD) == head + new + tail


@given(st.lists(lines), newlines, st.booleans())
def test_a_card_is_added_at_the_end_and_a_second_time_changes_nothing(
    before: list[str], newline: str, ends: bool
) -> None:
    text = newline.join(before) + (newline if ends else "")
    once = put_block(text, CARD)
    assert once.startswith(text)
    assert once.replace("\r\n", "\n").endswith(CARD)
    assert put_block(once, CARD) == once
    assert put_block(put_block(once, OTHER), CARD) == once
    assert ("\r\n" in once) == ("\r\n" in text)
    assert "\r\r" not in once


@pytest.mark.parametrize(
    "text",
    [
        f"{BEGIN}\ntext\n",
        f"text\n{END}\n",
        f"{END}\n{BEGIN}\n",
        f"{BEGIN}\n{BEGIN}\n{END}\n",
        f"{BEGIN}\n{BEGIN}\n{END}\n{END}\n",
        f"{CARD}text\n{CARD}",
    ],
)
def test_damaged_markers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="do not enclose one block") as caught:
        put_block(text, CARD)
    assert "in line 1" in caught.value.message or "in line 2" in caught.value.message
    assert BEGIN in caught.value.hint


@pytest.mark.parametrize("fence", ["```", "~~~~"])
def test_an_example_between_fences_is_no_block(fence: str) -> None:
    text = f"# How\n\n{fence}html\n{CARD}{fence}\n"
    once = put_block(text, OTHER)
    assert once == f"{text}\n{OTHER}"
    assert put_block(once, CARD) == f"{text}\n{CARD}"


@pytest.mark.parametrize(
    "text",
    [
        "```inline code``` on a line\n",
        "- ```sh\n  a\n\ntext\n",
        "> ```sh\n> a\n\ntext\n",
        "```sh\na\n~~~\n```\n",
        "    ```\n",
        f"text\n\n    {BEGIN}\n",
    ],
    ids=["inline", "in a list", "in a quote", "other fence", "indented", "a marker"],
)
def test_what_commonmark_takes_for_no_open_fence_is_none(text: str) -> None:
    once = put_block(text, OTHER)
    assert once == f"{text}\n{OTHER}"
    assert put_block(once, CARD) == f"{text}\n{CARD}"


def test_a_card_whose_own_code_closes_an_open_block_is_refused_as_one() -> None:
    card = CARD.replace(END, f"```sh\nqaudit scan\n```\n{END}")
    with pytest.raises(UsageError, match="never closed"):
        put_block("```sh\na\n", card)


@pytest.mark.parametrize("text", ["```sh\na\n", "~~~~\n~~~\n"])
def test_a_card_at_an_end_that_is_not_shown_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="never closed"):
        put_block(text, CARD)


def test_an_empty_readme_is_the_card_alone() -> None:
    assert put_block("", CARD) == CARD
    assert put_block("\ufeff", CARD) == "\ufeff" + CARD
    assert put_block("\ufeff" + CARD, OTHER) == "\ufeff" + OTHER
