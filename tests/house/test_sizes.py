"""Sizes are a smell test, not a law: what is too long is named at the end of the test run."""

from __future__ import annotations

from tests.house.source import oversized


def test_a_long_module_is_named() -> None:
    assert list(oversized("a.py", "x = 1\n" * 500)) == []
    assert list(oversized("a.py", "x = 1\n" * 501)) == ["a.py has 501 lines (at most about 500)"]


def test_a_long_function_is_named() -> None:
    body = "def f():\n" + "    x = 1\n" * 60
    assert list(oversized("a.py", body)) == ["a.py:1 f has 61 lines (at most about 60)"]
