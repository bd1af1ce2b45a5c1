"""Names, codes, plug-ins, phrases and what the repository says about itself.

A scheme is one file: nothing else in the package names it, except sets of schemes. A short list of
phrases stays out of pages, help, messages and docstrings; CONTRIBUTING has the rules behind it.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

from qaudit.core.registry import merges, schemes
from qaudit.types import CODES, metrics
from qaudit.types.metrics import METRICS
from tests.house.source import PACKAGE, ROOT, modules, parsed, tracked_files

EMPTY_NAMES = {"one", "own", "left", "there", "done", "known", "others"}
EMPTY_NAMES_LEFT = 42
"""How many variables may have them: a number that only falls."""

SHARED = ("tests.support", "tests.house", "tests.zoo")
VAGUE = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}

# The machine this was first written on, in pieces, so that this file does not name it.
ELSEWHERE = re.compile(
    "|".join([r"/wo" + r"rk(?![a-z])", r"\bsha" + r"red/", r"\bproto" + "types"])
)
BINARY = {".safetensors", ".bin", ".npz", ".png", ".parquet", ".gz", ".ico", ".eval"}


def test_a_module_has_a_name_and_a_docstring_and_is_ascii_in_a_package():
    for module in modules():
        assert not VAGUE & set(re.split(r"[._]", module.name)), module.name
        assert ast.get_docstring(module.tree), module.name
        assert module.text.isascii(), module.name
        assert (module.path.parent / "__init__.py").exists(), module.name


def test_ever_fewer_variables_have_a_name_that_says_nothing():
    stored = [n for m in modules() for n in ast.walk(m.tree) if isinstance(n, ast.Name)]
    empty = [n for n in stored if isinstance(n.ctx, ast.Store) and n.id in EMPTY_NAMES]
    assert len(empty) <= EMPTY_NAMES_LEFT


def test_a_class_has_a_name_of_its_own():
    places = defaultdict(list)
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_test_imports_from_another_test():
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        # A program in a string may import the test that it is in.
        imports = re.findall(r"^ *(?:from|import) (tests\b[\w.]*)", path.read_text("utf-8"), re.M)
        targets = [target for target in imports if path.stem not in target]
        wrong += [(path.name, target) for target in targets if not target.startswith(SHARED)]
    assert wrong == []


def test_every_code_is_in_the_one_table_of_rules_in_order():
    used = {code for module in modules() for code in re.findall(r'"(QA\d{3})"', module.text)}
    assert used and used <= set(CODES)
    text = Path(metrics.__file__).read_text(encoding="utf-8")
    of_audits = re.findall(r"^(QA\d{3}) ", text, re.MULTILINE)
    every = [*of_audits, *{metric.code for metric in METRICS.values()}]
    assert sorted(every) == list(CODES)  # none has two meanings
    assert all(rule.title and not rule.title.endswith(".") for rule in CODES.values())
    assert all(rule.help.endswith(".") for rule in CODES.values())


def test_every_plugin_and_family_is_described_in_a_line_and_documented():
    plugins = [*schemes().values(), *merges().values()]
    for plugin in plugins:
        description = (vars(plugin).get("__doc__") or "").split("\n")[0]
        assert description.endswith("."), plugin
        assert not description.startswith(plugin.__name__ + "(")  # what dataclass writes by itself
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    families = [path.stem for path in sorted((PACKAGE / "families").glob("*.yaml"))]
    names = [*(plugin.name for plugin in plugins), *families]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_no_file_speaks_of_the_machine_it_was_written_on():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in tracked_files()
        if path.suffix not in BINARY
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if ELSEWHERE.search(line)
    ]
    assert found == []


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


def mentions(path, tree):
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


def test_no_scheme_is_named_outside_its_file():
    seen = []
    for file in sorted(Path(PACKAGE).rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        if not path.startswith("core/schemes/") and path not in SETS:
            seen += mentions(path, parsed(file.read_text(encoding="utf-8")))
    assert seen == []


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


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def strings(path):
    """Yield what a file says: a page whole, a module's strings and docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield re.sub(r"^\| before \|.*?\n\n", "", text, flags=re.M | re.S)  # examples of both
        return
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def phrases(path):
    return [
        match[0] for text in strings(path) for match in PHRASES.finditer(" ".join(text.split()))
    ]


def test_no_old_phrase_is_read_by_anyone():
    by_file = {name_of(path): phrases(path) for path in [*PAGES, *MODULES]}
    assert {name: read for name, read in by_file.items() if read} == {}
