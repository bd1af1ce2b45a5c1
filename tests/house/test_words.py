"""A short list of phrases stays out of what a person reads: pages, help, messages, docstrings.

CONTRIBUTING has the rules behind it, with examples.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import PACKAGE, ROOT, parsed

PHRASES = re.compile(
    r"""\b(?:
        not\ to\ be\ told | (?:can|could)\s?not\ be\ told | can\ be\ told | told\ apart
        | whoever | somebody | nobody | anybody | the\ dead
        | mend(?:s|ed|ing)? | lies?\ (?:in|on|beside|there) | stands?\ (?:in|on|beside|there)
        | brought(?!\.jsonl) | what\ was\ (?:asked|said|told|found)
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)

PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "action.yml")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.*")),
]
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def strings(path: Path) -> Iterator[str]:
    """Yield what a file says: a page whole, a module's strings and docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield re.sub(r"^\| before \|.*?\n\n", "", text, flags=re.M | re.S)  # examples of both
        return
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def phrases(path: Path) -> list[str]:
    return [
        match[0] for text in strings(path) for match in PHRASES.finditer(" ".join(text.split()))
    ]


def test_no_old_phrase_is_read_by_anyone() -> None:
    by_file = {name_of(path): phrases(path) for path in [*PAGES, *MODULES]}
    assert {name: read for name, read in by_file.items() if read} == {}
