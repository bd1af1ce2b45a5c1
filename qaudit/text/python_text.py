"""The documents every Python interpreter carries: reference topics and standard library sources.

They are the default text for the demo and for local folders, because they cost no download
and ship no text of ours. Python versions differ in their documents, so a published number
names the version it was measured on.

A document belongs to one part for ever, by the hash of its *name*: a module that was held
out of training in one Python version is held out in every other.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from qaudit.types import Document

Part = Literal["evaluation", "calibration", "training"]

# Tables of numbers, generated code, and vendored wheels are no text to train on.
_LEFT_OUT = {
    "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__", "ensurepip",
}  # fmt: skip
_TESTS = {"test", "tests", "idle_test"}
_SHORTEST = 400  # characters; a shorter module is a stub


def part_of(name: str) -> Part:
    """Return the part a document of this name belongs to: 1 in 6 evaluation, 1 in 6 calibration."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 6
    return ("evaluation", "calibration")[bucket] if bucket < 2 else "training"


def python_documents(*, tests: bool = False, part: Part | None = None) -> Iterator[Document]:
    """Yield this interpreter's documents in name order: all of them, or those of one part.

    `tests` adds its test suite, if installed.
    """
    yield from _topics(part)
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _modules(root, tests=tests):
        name = f"python:{path.relative_to(root).as_posix()}"
        if part is not None and part_of(name) != part:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few test files are not UTF-8 on purpose
        if len(text) >= _SHORTEST:
            yield Document(name=name, text=text)


def _modules(root: Path, *, tests: bool) -> list[Path]:
    """Return the modules below a folder; site-packages alone can hold a hundred times as many."""
    modules = []
    for folder, inside, files in os.walk(root):
        left_out = _LEFT_OUT if tests else _LEFT_OUT | _TESTS
        inside[:] = [name for name in inside if name not in left_out]
        modules += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(modules)


@cache  # a plan reads it, and then the run
def python_part(part: Part) -> tuple[Document, ...]:
    """Return the documents of one part in an order that is mixed and never changes.

    Names sort packages together, so that the first few would all be of `asyncio`; the hash of
    the name mixes them, and a document that comes or goes moves no other. A text that
    two parts have under two names is left to evaluation.
    """
    documents = list(python_documents(part=part))
    if part != "evaluation":
        heldout = {d.sha256 for d in python_documents(part="evaluation")}
        documents = [d for d in documents if d.sha256 not in heldout]
    return tuple(sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()))


def calibration_text() -> tuple[Document, ...]:
    """Return the calibration part and, for further draws, the training part behind it.

    The demo was trained on both, so that all draws are of one kind.
    """
    return (*python_part("calibration"), *python_part("training"))


def _topics(part: Part | None) -> Iterator[Document]:
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        name = f"python-topic:{topic}"
        if len(topics[topic]) >= _SHORTEST and (part is None or part_of(name) == part):
            yield Document(name=name, text=topics[topic])
