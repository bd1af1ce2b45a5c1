"""A scheme is one file: nothing else in the package names it, except sets of schemes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from qaudit.core.registry import schemes
from tests.house.source import PACKAGE, parsed

SETS = {"settings.py", "core/registry.py"}
"""Default sets, and hints for names of other projects."""

TYPES = frozenset({"gptq", "awq", "fp8", "int8", "nvfp4", "mxfp4"})
"""Formats of files and types of numbers, too, which some schemes are named after."""
OF_TYPES = (
    "checkpoints/",
    "export/",
    "formats/",
    "core/floats.py",
    "core/scheme.py",
    "cli/export.py",
)

NAMES = sorted(schemes(), key=len, reverse=True)
MENTION = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, NAMES))})(-\dbit)?(?![\w/-])")
CLASSES = {plugin.__name__ for plugin in schemes().values()}


def mentions(path: str, tree: ast.AST) -> Iterator[str]:
    """Yield what names a scheme: texts but docstrings, classes, imports, and looks at a name."""
    loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loose:
            for name, bits in MENTION.findall(node.value):
                if bits or name not in TYPES or not path.startswith(OF_TYPES):
                    yield f"{where} has `{name}{bits}`"
        elif isinstance(node, ast.ImportFrom | ast.Import):
            modules = [getattr(node, "module", None) or "", *(one.name for one in node.names)]
            if any(module.startswith("qaudit.core.schemes.") for module in modules):
                yield f"{where} imports a scheme"
        elif isinstance(node, ast.Name) and node.id in CLASSES:
            yield f"{where} has `{node.id}`"
        elif isinstance(node, ast.Compare | ast.Match) and any(
            isinstance(side, ast.Attribute) and ast.unparse(side).endswith("scheme.name")
            for side in (
                [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.subject]
            )
        ):
            yield f"{where} looks at the name of a scheme"


def test_no_scheme_is_named_outside_its_file() -> None:
    seen: list[str] = []
    for file in sorted(Path(PACKAGE).rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        if not path.startswith("core/schemes/") and path not in SETS:
            seen += mentions(path, parsed(file.read_text(encoding="utf-8")))
    assert seen == []
