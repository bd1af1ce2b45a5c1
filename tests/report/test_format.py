from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len  # an independent table of widths

from qaudit.report.format import listing, padded, shortened, width_of, wrapped

# Letters whose width is the same in every version of Unicode's tables: ASCII, accents, kana,
# ideographs, Hangul, Cyrillic, and a combining accent.
letters = st.sampled_from("ab-_ 0\u00e9\u0416\u30ab\u6f22\ud55c\uff21\u0301")
texts = st.text(letters, max_size=60)


@given(texts)
def test_widths_are_those_of_another_table(text: str) -> None:
    assert width_of(text) == cell_len(text)


@given(texts, st.integers(6, 40))
def test_a_shortened_text_fits_and_keeps_both_ends(text: str, width: int) -> None:
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
def test_wrapped_lines_fit_and_lose_no_letter(text: str, width: int) -> None:
    lines = wrapped(text, width).split("\n")
    assert all(width_of(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == "".join(text.split())


@pytest.mark.parametrize(("align", "expected"), [("<", "\u6f22  "), (">", "  \u6f22")])
def test_padding_counts_columns(align: str, expected: str) -> None:
    assert padded("\u6f22", 4, align) == expected


def test_a_list_of_names_may_be_empty() -> None:
    assert [listing(["a", "b", "c"][:k]) for k in range(4)] == [
        "none",
        "a",
        "a and b",
        "a, b and c",
    ]
