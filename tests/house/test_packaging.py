"""The wheel holds what the package reads, the lock what the package needs, the workflows pins.

An index shows the readme without the repository beside it, and what is not known before a release
is stated once.
"""

from __future__ import annotations

import re
import shutil
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import qaudit
from qaudit.recipe.table import recipes_folder
from tests.house.source import PACKAGE, ROOT, tracked_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)#]+)")
UNKNOWN = re.compile(r"\bOWNER\b|\b(?:TODO|FIXME|XXX|TBD)\b")
"""The account that a release belongs to, and words for what is not finished."""


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> set[str]:
    with zipfile.ZipFile(wheel_file) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_file_of_the_package(wheel: set[str]) -> None:
    files = [path for path in PACKAGE.rglob("*") if path.is_file()]
    needed = {
        path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts
    }
    assert needed - wheel == set()


def test_the_wheel_holds_the_recipes_inside_the_package(wheel: set[str]) -> None:
    recipes = [path for path in (ROOT / "recipes").rglob("*") if path.is_file()]
    assert recipes
    assert {f"qaudit/recipes/{path.relative_to(ROOT / 'recipes')}" for path in recipes} <= wheel


def test_the_wheel_holds_nothing_beside_the_package(wheel: set[str]) -> None:
    info = f"qaudit_llm-{qaudit.__version__}.dist-info"
    assert {name.partition("/")[0] for name in wheel} == {"qaudit", info}


def test_recipes_are_found_in_this_installation() -> None:
    assert (recipes_folder() / "README.md").is_file()


@pytest.fixture(scope="module")
def shown(wheel_file: Path) -> str:
    """Return the page that an index makes of the wheel."""
    with zipfile.ZipFile(wheel_file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        page = Parser().parsestr(archive.read(name).decode()).get_payload()
    assert isinstance(page, str)
    return page


def test_the_index_shows_the_readme_with_links_that_lead_to_the_repository(shown: str) -> None:
    links, files = LINK.findall(shown), LINK.findall(README)
    assert len(links) == len(files) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    for link, file in zip(links, files, strict=True):
        kind = "raw" if file.endswith(".png") else "blob"
        place = f"{PROJECT['urls']['Repository']}/{kind}/main/{file}"
        assert link in (file, place)


def test_a_release_links_to_its_own_tag(tmp_path: Path) -> None:
    for path in (ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "packaging", tmp_path / "packaging")
    (tmp_path / "qaudit").mkdir()
    (tmp_path / "qaudit" / "version.py").write_text('__version__ = "1.2.3"\n')
    page = WheelBuilder(str(tmp_path)).metadata.core.readme
    assert f"({PROJECT['urls']['Repository']}/blob/v1.2.3/docs/gating.md)" in page


def test_what_is_unknown_before_a_release_is_stated_once() -> None:
    urls = set(PROJECT["urls"].values())
    rows = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in tracked_files()
        if path.suffix in {".md", ".toml", ".yml", ".yaml", ".cff", ".py", ""}
        and path != Path(__file__)
        for line in path.read_text(encoding="utf-8").splitlines()
        if UNKNOWN.search(line) and not any(url in line for url in urls)
    ]
    templates = {f"docs/ci/{name}.yml" for name in ("pull-request", "release", "schedule")}
    elsewhere = [row for row in rows if row.partition(":")[0] not in templates]
    assert len(elsewhere) == 1 and elsewhere[0].startswith("pyproject.toml: # OWNER is not known")


def test_the_workflow_refuses_to_publish_under_another_address() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert 'test "$address" = "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"' in text


def test_the_container_file_copies_what_a_build_reads(tmp_path: Path) -> None:
    text = (ROOT / "packaging" / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (?!--from)(.*)", text, re.M):
        *names, target = line.split()
        for name in names:
            place = tmp_path / target / name if target == "./" else tmp_path / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                place.symlink_to(ROOT / name)
            else:
                shutil.copy(ROOT / name, place)
    builder = WheelBuilder(str(tmp_path))
    assert list(builder.build(directory=str(tmp_path / "out"), versions=["editable"]))


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


@pytest.mark.parametrize("text", PROJECT["dependencies"])
def test_every_dependency_is_locked_within_its_range(text: str) -> None:
    requirement = Requirement(text)
    version = locked("run.lock")[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


@pytest.mark.parametrize("text", PROJECT["optional-dependencies"]["dev"])
def test_every_development_tool_is_locked_within_its_range(text: str) -> None:
    requirement = Requirement(text)
    versions = locked("run.lock") | locked("dev.lock")
    assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


def test_the_lock_leaves_the_build_of_torch_to_the_index() -> None:
    assert re.fullmatch(r"[0-9.]+", locked("run.lock")["torch"])
