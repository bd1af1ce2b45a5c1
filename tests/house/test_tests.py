"""Tests mirror the package and share code by way of `tests/support` alone."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.source import PACKAGE, ROOT

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("test_*.py"))
OWN = {"contract", "golden", "house", "journey", "peers", "support", "zoo"}
"""Folders that hold no room of the package; CONTRIBUTING.md has them in a table."""

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


def test_every_folder_of_tests_mirrors_a_room() -> None:
    folders = {path.relative_to(TESTS).parent for path in FILES} - {Path()}
    rooms = [folder for folder in folders if folder.parts[0] not in OWN]
    assert [str(room) for room in rooms if not (PACKAGE / room).is_dir()] == []


def test_a_test_of_no_room_is_named_after_a_module_of_the_package() -> None:
    names = [path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")]
    assert [name for name in names if not (PACKAGE / f"{name}.py").is_file()] == []
