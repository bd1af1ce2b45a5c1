"""The wheel holds what the package reads, the lock what the package needs, the workflows pins."""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import qaudit
from qaudit.recipe.table import recipes_folder
from tests.house.source import PACKAGE, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


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


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"check", "nightly", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = re.findall(r"uses: *(.*)", path.read_text(encoding="utf-8"))
    assert used
    assert [use for use in used if not re.fullmatch(r"\S+@[0-9a-f]{40} +# v\d[\d.]*", use)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_starts_without_permissions(path: Path) -> None:
    assert re.search(r"^permissions: \{\}$", path.read_text(encoding="utf-8"), re.M)
