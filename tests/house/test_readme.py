"""What README.md says is so: the help, and the map of the files."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.house.source import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def block_after(line: str) -> str:
    """Return the rest of the fenced block that opens with this line."""
    match = re.search(rf"^```\w*\n{re.escape(line)}\n(.*?)^```", README, re.M | re.S)
    assert match, f"README.md has no block that begins with `{line}`"
    return match[1]


def test_the_help_in_the_readme_is_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from qaudit.cli import main; main()", "--help"],
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert block_after("$ qaudit --help").strip() == done.stdout.strip()


def test_the_map_names_every_file_of_the_package_and_no_other() -> None:
    entries = block_after("qaudit/").splitlines()
    named = {"qaudit/" + path for path in _paths(entries)}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "qaudit").rglob("*")
        if path.suffix in {".py", ".yaml"} and path.name != "__init__.py"
    }
    assert {path for path in named if path.endswith((".py", ".yaml"))} == package
    assert [path for path in named if not (ROOT / path).exists()] == []


def _paths(entries: list[str]) -> list[str]:
    """Read an indented map, two spaces a level, folders ending in `/`."""
    folders: list[str] = []
    paths = []
    for entry in entries:
        if not entry.strip():
            continue
        level = (len(entry) - len(entry.lstrip())) // 2 - 1
        name = entry.split()[0]
        folders = folders[:level]
        paths.append("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return paths


def test_every_entry_of_the_map_has_a_comment() -> None:
    assert [line for line in block_after("qaudit/").splitlines() if len(line.split()) == 1] == []
