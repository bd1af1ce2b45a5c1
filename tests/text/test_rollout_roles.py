"""Roles of what a model wrote, by markers as tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from qaudit.text.rollouts import TokenMarker, roles_of, separable
from qaudit.types import CALL, REASONING, ROLES
from tests.support.chats import THINKING, chat_of, tokenizer

THINK, CALLS = TokenMarker(REASONING, (1,), (2,)), TokenMarker(CALL, (3, 30, 4), ())


@pytest.mark.parametrize(
    ("prompt", "written", "wanted"),
    [
        ((9,), (9, 9), "aa"),
        ((9,), (1, 9, 2, 9), "rrra"),
        ((9, 1, 9), (9, 2, 9), "rra"),  # the template begins the reasoning
        ((9, 1, 9, 2, 9), (9, 9), "aa"),  # and ends it, where none is wanted
        ((9, 1), (9, 9), "rr"),  # the limit of tokens cut it
        ((1, *(9,) * 20), (9, 2, 9), "rra"),
        ((9,), (9, 2, 9, 2), "rraa"),
        ((9,), (1, 9, 2, 9, 3, 30, 4, 9), "rrracccc"),
        ((9,), (3, 30, 9), "aaa"),
        ((9,), (1, 9, 2, 1, 9), "rrrrr"),
    ],
)
def test_markers_tell_roles(prompt: tuple[int, ...], written: tuple[int, ...], wanted: str) -> None:
    roles = roles_of(prompt, written, (THINK, CALLS))
    assert "".join(ROLES[role][0] for role in roles) == wanted


def test_markers_that_other_tokens_may_join_tell_nothing() -> None:
    assert separable((THINK,), ()) == (THINK,)
    assert separable((THINK, CALLS), {3, 4}) == (THINK, CALLS)
    assert separable((THINK, CALLS), {3}) == ()


def test_markers_are_those_of_the_template(tmp_path: Path) -> None:
    ids = tokenizer(None).convert_tokens_to_ids(["<think>", "</think>"])
    with chat_of(tmp_path, THINKING) as chat:
        assert chat.token_markers == (TokenMarker(REASONING, (ids[0],), (ids[1],)),)
    (tmp_path / "none").mkdir()
    with chat_of(tmp_path / "none", None) as chat:
        assert chat.token_markers == ()
