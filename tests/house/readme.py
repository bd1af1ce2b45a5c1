"""Write what repeats what the code says: the help and the rooms in README.md, docs/map.md whole.

    make readme

In README.md each stands between two markers. The map takes a module's first line of docstring (a
family's first comment) as its comment, so whoever writes a module has already documented it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.house import commands
from tests.house.source import PACKAGE, ROOT

README = ROOT / "README.md"
MAP = ROOT / "docs" / "map.md"
MAP_HEAD = """# Every file

<!-- written by `make readme` from the files themselves: edit their first lines -->

Where a line of code belongs: the rooms are in the order of their names, and imports point one way,
`errors <- types <- core <- {recipe, policy, judge, sources, report} <- engine <- cli`, with `lab`
beside `engine`.

"""
DATA = {"demo": "The series behind `qaudit scan demo`: weights, tokenizer, training log"}


def help_text() -> str:
    """Return what `qaudit --help` prints in a terminal of 80 columns."""
    code = "import sys; sys.argv = ['qaudit', '--help']; from qaudit.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (line.rstrip() for line in done.stdout.strip().splitlines())
    return "```console\n$ qaudit --help\n" + "\n".join(lines) + "\n```"


def room_map() -> str:
    """Return the package's rooms, one a line, each with its comment."""
    rooms = [entry for entry in _entries(PACKAGE, 1) if entry[0].endswith("/")]
    return _drawn([("qaudit/", comment(PACKAGE / "__init__.py")), *rooms])


def file_map() -> str:
    """Return the package's files, one a line, each with its comment."""
    return _drawn([("qaudit/", comment(PACKAGE / "__init__.py")), *_entries(PACKAGE, 1)])


def map_page() -> str:
    """Return docs/map.md."""
    return MAP_HEAD + file_map() + "\n"


def _drawn(entries: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in entries) + 2
    lines = (f"{name:<{width}}{text}".rstrip() for name, text in entries)
    return "```text\n" + "\n".join(lines) + "\n```"


def _entries(folder: Path, depth: int) -> list[tuple[str, str]]:
    indent = "  " * depth
    entries: list[tuple[str, str]] = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.name in DATA or (path / "__init__.py").exists():
            text = DATA.get(path.name) or comment(path / "__init__.py")
            entries.append((f"{indent}{path.name}/", text))
            entries += [] if path.name in DATA else _entries(path, depth + 1)
        elif path.suffix in {".py", ".yaml"} and path.name != "__init__.py":
            entries.append((f"{indent}{path.name}", comment(path)))
    return entries


def comment(path: Path) -> str:
    """Return the first line of what a file says about itself."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    return text.lstrip("# ").partition("\n")[0].rstrip(".")


def rendered(text: str) -> str:
    """Return README's text with both parts brought up to date."""
    for name, part in (("help", help_text()), ("map", room_map())):
        marked = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.S)
        assert marked.search(text), f"README.md lacks the markers of its {name}"
        text = marked.sub(lambda match, part=part: match[1] + part + match[2], text)
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")
    MAP.write_text(map_page(), encoding="utf-8")
    commands.PAGE.write_text(commands.page(), encoding="utf-8")
