"""Names, codes, plug-ins and what the repository says about itself."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from qaudit.core.registry import merges, schemes
from qaudit.types import CODES, metrics
from qaudit.types.metrics import METRICS
from tests.house.source import PACKAGE, ROOT, modules, tracked_files

EMPTY_NAMES = {"one", "own", "left", "there", "done", "known", "others"}
EMPTY_NAMES_LEFT = 60
"""How many variables still have them: a number that only falls."""

SHARED = ("tests.support", "tests.house", "tests.zoo")
VAGUE = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}

# The machine this was first written on, in pieces, so that this file does not name it.
ELSEWHERE = re.compile(
    "|".join([r"/wo" + r"rk(?![a-z])", r"\bsha" + r"red/", r"\bproto" + "types"])
)
BINARY = {".safetensors", ".bin", ".npz", ".png", ".parquet", ".gz", ".ico", ".eval"}


def prose() -> str:
    """Return what a person reads to learn what there is."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def plugins() -> list[type]:
    return [*schemes().values(), *merges().values()]


def test_no_module_is_called_after_nothing() -> None:
    assert [m.name for m in modules() if VAGUE & set(re.split(r"[._]", m.name))] == []


def test_ever_fewer_variables_have_a_name_that_says_nothing() -> None:
    count = sum(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES
        for module in modules()
        for node in ast.walk(module.tree)
    )
    assert count <= EMPTY_NAMES_LEFT
    assert count > EMPTY_NAMES_LEFT - 20, f"lower EMPTY_NAMES_LEFT to {count}"


def test_a_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_every_module_says_what_it_is() -> None:
    assert [m.name for m in modules() if not ast.get_docstring(m.tree)] == []


def test_no_test_imports_from_another_test() -> None:
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        # A program in a string may import the test that it is in.
        imports = re.findall(r"^ *(?:from|import) (tests\b[\w.]*)", path.read_text("utf-8"), re.M)
        targets = [target for target in imports if path.stem not in target]
        wrong += [(path.name, target) for target in targets if not target.startswith(SHARED)]
    assert wrong == []


def test_every_code_is_in_the_one_table_of_rules_in_order() -> None:
    used = {code for module in modules() for code in re.findall(r'"(QA\d{3})"', module.text)}
    assert used and used <= set(CODES)
    text = Path(metrics.__file__).read_text(encoding="utf-8")
    of_audits = re.findall(r"^(QA\d{3}) ", text, re.MULTILINE)
    every = [*of_audits, *{metric.code for metric in METRICS.values()}]
    assert sorted(every) == list(CODES)  # none has two meanings
    assert all(rule.title and not rule.title.endswith(".") for rule in CODES.values())
    assert all(rule.help.endswith(".") for rule in CODES.values())


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {module.path.parent for module in modules()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_code_is_ascii() -> None:
    assert [module.name for module in modules() if not module.text.isascii()] == []


def test_every_plugin_describes_itself_in_one_line() -> None:
    for plugin in plugins():
        description = (vars(plugin).get("__doc__") or "").split("\n")[0]
        assert description.endswith("."), plugin
        assert not description.startswith(plugin.__name__ + "(")  # what dataclass writes by itself


def test_every_plugin_and_family_is_documented() -> None:
    families = [path.stem for path in sorted((PACKAGE / "families").glob("*.yaml"))]
    names, text = [*(plugin.name for plugin in plugins()), *families], prose()
    assert [name for name in names if f"`{name}`" not in text] == []


def test_no_file_speaks_of_the_machine_it_was_written_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in tracked_files()
        if path.suffix not in BINARY
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if ELSEWHERE.search(line)
    ]
    assert found == []
