"""A quantized file makes the tokens of its base, or is refused by the part that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qaudit.errors import UsageError
from qaudit.formats.weights import must_match

BASE: dict[str, Any] = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}


def folders(tmp_path: Path, own: dict[str, Any]) -> tuple[Path, Path]:
    for name, table in (("own", own), ("base", BASE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(table))
    return tmp_path / "own", tmp_path / "base"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "another normalizer"),
        ({"normalizer": None}, "another normalizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "another pre-tokenizer"),
        ({"model": {**BASE["model"], "merges": [["b", "a"]]}}, "other merges"),
        ({"model": {**BASE["model"], "merges": []}}, "other merges"),
        ({"model": {**BASE["model"], "vocab": {"a": 1, "b": 0, "ab": 2}}}, "another vocabulary"),
    ],
)
def test_a_tokenizer_that_makes_other_tokens_is_refused_by_its_part(
    change: dict[str, Any], part: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"has {part} than"):
        must_match("m", *folders(tmp_path, {**BASE, **change}))


def test_merges_in_an_older_notation_and_missing_defaults_are_the_same(tmp_path: Path) -> None:
    older = {"type": "ByteLevel", "add_prefix_space": False}
    own = {**BASE, "pre_tokenizer": older, "model": {**BASE["model"], "merges": ["a b"]}}
    must_match("m", *folders(tmp_path, own))
