"""The package as text: its modules and what they import. No import of qaudit."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "qaudit"

MACHINERY = frozenset({"diagnostic"})  # of diagnostics
RUNNING = frozenset({"case", "driver"})


def room_of(name):
    """Return the room of a dotted name.

    A diagnostic is a room of its own, above the report, and what measures it one above the engine.
    """
    room, *inside = [*name.split(".")[1:], ""]
    if room == "diagnostics" and inside[0] and inside[0] not in MACHINERY:
        runs = inside[0] in RUNNING or "_" in inside[0]
        return f"{room}.measure" if runs else f"{room}.named"
    return room


@dataclass(frozen=True)
class Module:
    """One file of Python."""

    name: str
    path: Path
    text: str

    @property
    def room(self):
        """The room of the module: the second word of its dotted name, or a part of a diagnostic."""
        return room_of(self.name)

    @property
    def tree(self):
        return parsed(self.text)


@dataclass(frozen=True)
class Import:
    """One imported module and how it is imported."""

    target: str
    line: int
    deferred: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING`


@cache
def parsed(text):
    """Parse a file once for all tests that look at it: the package takes a second."""
    return ast.parse(text)


def modules():
    """Return every module of the package."""
    return tuple(
        Module(_dotted(path), path, path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    )


def _dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(tree):
    """Return what a module imports, wherever in it the import stands."""
    return tuple(_imports(tree, deferred=False, typing=False))


def _imports(node, *, deferred, typing):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, deferred, typing)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", child.lineno, deferred, typing)
        elif isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            for statement in child.body:
                wrapped = ast.Module(body=[statement], type_ignores=[])
                yield from _imports(wrapped, deferred=deferred, typing=True)
            for statement in child.orelse:
                wrapped = ast.Module(body=[statement], type_ignores=[])
                yield from _imports(wrapped, deferred=deferred, typing=typing)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, deferred=deferred or inside, typing=typing)


def tracked_files():
    """Return the files that git tracks."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return tuple(path for path in paths if path.is_file())
