"""Names in sentences: the nearest one, and the first of many."""

from __future__ import annotations

import pytest

from qaudit.support.keys import first_of


@pytest.mark.parametrize(
    ("names", "most", "text"),
    [
        (["a"], 3, "`a`"),
        (["a", "b", "c"], 3, "`a`, `b`, `c`"),
        (["a", "b", "c", "d"], 3, "`a`, `b`, `c` and 1 more"),
        (["a", "b", "c"], 1, "`a` and 2 more"),
    ],
)
def test_the_first_names_are_quoted_and_the_others_counted(names, most, text):
    assert first_of(names, most) == text
