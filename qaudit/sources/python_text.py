"""The documents every Python interpreter carries: reference topics and standard library sources.

They are the default text for the demo and for local folders, because they cost no download
and ship no text of ours. Python versions differ in their documents, so a published number
names the version it was measured on.

A document belongs to one part for ever, by the hash of its *name*: a module that was held
out of training in one Python version is held out in every other.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from qaudit.types import Document

Part = Literal["evaluation", "calibration", "training"]

# Tables of numbers, generated code, and vendored wheels are not text anybody trains on.
_LEFT_OUT = {
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "ensurepip",
}
_TESTS = {"test", "tests", "idle_test"}
_SHORTEST = 400  # characters; a shorter module is a stub


def part_of(name: str) -> Part:
    """Return the part a document of this name belongs to: 1 in 6 evaluation, 1 in 6 calibration."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 6
    return ("evaluation", "calibration")[bucket] if bucket < 2 else "training"  # type: ignore[return-value]


def python_documents(*, tests: bool = False) -> Iterator[Document]:
    """Yield this interpreter's documents in name order; `tests` adds its own test suite."""
    yield from _topics()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        folders = set(inside.parts[:-1])
        if folders & _LEFT_OUT or (folders & _TESTS and not tests):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few test files are not UTF-8 on purpose
        if len(text) >= _SHORTEST:
            yield Document(name=f"python:{inside.as_posix()}", text=text)


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        if len(topics[name]) >= _SHORTEST:
            yield Document(name=f"python-topic:{name}", text=topics[name])
