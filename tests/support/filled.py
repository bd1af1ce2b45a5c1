"""Loops that assert something: over nothing they would assert nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def filled(values: Iterable[T]) -> Iterator[T]:
    """Yield the values one after another; fail at the end if there was none."""
    empty = True
    for value in values:
        empty = False
        yield value
    assert not empty, "there was nothing to loop over"
