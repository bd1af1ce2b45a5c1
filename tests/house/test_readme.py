"""What README.md says is so: its length, the paths it names."""

from __future__ import annotations

import ast
import re

from tests.house.source import PACKAGE, ROOT, modules

README = ROOT / "README.md"
MOST_WORDS = 750  # with its commands and examples
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_readme_stays_short() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_the_table_of_rooms_names_every_room() -> None:
    section = CONTRIBUTING.partition("## Where things go\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)/?`", "".join(re.findall(r"^\| (.*?) \|", section, re.M)))
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert rooms - set(named) == set()
    assert [name for name in named if not list(PACKAGE.glob(f"{name}*"))] == []


def test_every_module_says_what_it_is() -> None:
    assert [m.name for m in modules() if not ast.get_docstring(m.tree)] == []


def test_links_to_files_lead_somewhere() -> None:
    pages = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        if not (ROOT / target).exists()
    ]
    assert broken == []
