"""Tests share code by way of `tests/support` alone."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.source import ROOT

TESTS = ROOT / "tests"
IMPORTS = re.compile(r"^ *(?:from|import) (tests\b[\w.]*)", re.M)
SHARED = ("tests.support", "tests.house", "tests.zoo")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_test_imports_from_another_test() -> None:
    wrong = []
    for path in sorted(TESTS.rglob("*.py")):
        # A program in a string may import the test that it is in.
        targets = (t for t in IMPORTS.findall(path.read_text("utf-8")) if path.stem not in t)
        wrong += [(name_of(path), target) for target in targets if not target.startswith(SHARED)]
    assert wrong == []
