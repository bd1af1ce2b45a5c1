"""Values of an answer, each refused where it is not what the Hub sends."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST_FILE = 1 << 53  # past it JSON numbers lose their last digits elsewhere
_LONGEST_PATH, _LONGEST_NAME = 4096, 255  # bytes; what file systems take


class GarbledError(ValueError):
    """An answer is not what the Hub sends."""


def plain_path(value: Any, what: str) -> str:
    """Return a relative path of plain segments, which cannot leave its folder."""
    if not isinstance(value, str) or not value:
        raise GarbledError(f"{what} is missing")
    segments = value.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or "\\" in value:
        raise GarbledError(f"{what} is {quoted(value)}, which is not a plain relative path")
    if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in value):
        raise GarbledError(f"{what} is {quoted(value)}, which holds control characters")
    longest = max(len(segment.encode()) for segment in segments)
    if len(value.encode()) > _LONGEST_PATH or longest > _LONGEST_NAME:
        raise GarbledError(f"{what} is longer than a file's name may be")
    return value


def whole_number(value: Any, path: str) -> int:
    """Return a whole number that JSON holds exactly."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST_FILE:
        raise GarbledError(f"the size of `{path}` is {quoted(value)}")
    return value


def matching(pattern: re.Pattern[str], value: Any, what: str) -> str:
    """Return a text of this form."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise GarbledError(f"{what} is {quoted(value)}, which is no such id")
    return value


def text_in(value: Any, what: str) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise GarbledError(f"{what} is {quoted(value)}, which is no text")
    return value


def table_in(value: Any, what: str) -> dict[str, Any]:
    """Return a table."""
    if not isinstance(value, dict):
        raise GarbledError(f"{what} is not a table")
    return value


def list_in(value: Any, what: str) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise GarbledError(f"{what} is not a list")
    return value


def tables_in(value: Any, what: str, each: str) -> list[dict[str, Any]]:
    """Return a list of tables."""
    return [table_in(entry, each) for entry in list_in(value, what)]


def quoted(value: Any) -> str:
    """Return a foreign value for a message: escaped and short."""
    text = ascii(value)
    return f"`{text[:80]}...`" if len(text) > 80 else f"`{text}`"
