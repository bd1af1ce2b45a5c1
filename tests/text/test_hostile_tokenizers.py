"""Tokenizers of others that take the memory or the time of a machine are refused by a child."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qaudit import sandbox
from qaudit.errors import ConfigurationError
from qaudit.text.tokenizer import load_tokenizer, must_be_bounded
from tests.support.models import save_tokenizer

SLOW = r"[\s\S]{0,60}[\s\S]{0,60}[\s\S]{0,60}[0-9](?<=[A-Z])"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QAUDIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    save_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, **parts: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def test_replacements_that_multiply_each_other_are_refused(folder: Path) -> None:
    change(folder, normalizer=sequence(*[replace({"String": "a"}, "a" * 20)] * 8))
    with pytest.raises(ConfigurationError, match=r"make up to 25,600,000,000 characters of one"):
        load_tokenizer(folder)


def test_a_pattern_whose_time_explodes_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(sandbox.__file__).with_name("tokenizer.py")
    quick = folder.parent / "tokenizer.py"
    quick.write_text(path.read_text().replace("1 << 32, 20", "1 << 32, 1"))
    monkeypatch.setattr(sandbox, "__file__", str(folder.parent / "__init__.py"))
    change(folder, normalizer=replace({"Regex": SLOW}, "b"))
    with pytest.raises(ConfigurationError, match="takes more than 20 seconds"):
        load_tokenizer(folder)


def test_a_pattern_that_the_library_gives_up_is_refused(folder: Path) -> None:
    change(folder, normalizer=replace({"Regex": "(?:[a-z ]|[a-z])+(?<=[A-Z])"}, "b"))
    with pytest.raises(ConfigurationError, match="its patterns fail on a page of text"):
        load_tokenizer(folder)


def test_an_ordinary_tokenizer_with_patterns_is_tried_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(folder, normalizer=sequence(replace({"String": " "}, "\u2581"), {"type": "NFC"}))
    load_tokenizer(folder)
    monkeypatch.setattr(sandbox.subprocess, "run", None)  # another child would be an error
    must_be_bounded(folder / "tokenizer.json")
