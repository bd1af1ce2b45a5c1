"""What README.md says is so: the help, the map of the files, the paths it names."""

from __future__ import annotations

import re

from tests.house.readme import MAP, README, comment, file_map, map_page, rendered
from tests.house.source import ROOT, modules

TEXT = README.read_text(encoding="utf-8")


def test_the_help_and_the_map_are_up_to_date() -> None:
    assert rendered(TEXT) == TEXT, "run `make readme`"


def test_the_page_of_every_file_is_up_to_date() -> None:
    assert MAP.read_text(encoding="utf-8") == map_page(), "run `make readme`"


def test_the_map_names_every_module() -> None:
    named = re.findall(r"^ +(\w+\.py) ", file_map(), re.M)
    found = [module.path.name for module in modules() if module.path.name != "__init__.py"]
    assert sorted(named) == sorted(found)


def test_every_module_says_what_it_is() -> None:
    assert [module.name for module in modules() if not comment(module.path)] == []


def test_links_to_files_lead_somewhere() -> None:
    pages = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        if not (ROOT / target).exists()
    ]
    assert broken == []
