"""`hf qaudit`: the extension's repository, installed and run by the client's own loader.

GitHub is a folder here, and pip installs what was built from this checkout; all else - how the
extension is found, what its program is called, how it is described and run - is the client's.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from hatchling.builders.wheel import WheelBuilder
from huggingface_hub.cli import extensions
from packaging.requirements import Requirement

import qaudit
from tests.house.source import ROOT

FOLDER = ROOT / "packaging" / "hf-qaudit"
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPO = "someone/hf-qaudit"
HEAD = "a" * 40


def on_github(method: str, url: str, **_: Any) -> SimpleNamespace:
    """Answer as GitHub would if the folder were a repository there."""
    raw = f"https://raw.githubusercontent.com/{REPO}/HEAD/"
    if url.startswith(raw):
        path = FOLDER / url.removeprefix(raw)
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            return SimpleNamespace(text=text, content=text.encode())
        request = httpx2.Request(method, url)
        raise httpx2.HTTPStatusError("404", request=request, response=httpx2.Response(404))
    if url == f"https://github.com/{REPO}.git/info/refs":
        return SimpleNamespace(text=f"015e{HEAD} HEAD\0multi_ack\n")
    assert (method, url) == ("HEAD", f"https://github.com/{REPO}")
    return SimpleNamespace()


@pytest.fixture
def github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the client keeps its extensions; nothing leaves this machine."""
    wheels = tmp_path / "wheels"
    for root, kind in ((ROOT, "editable"), (FOLDER, "standard")):
        list(WheelBuilder(str(root)).build(directory=str(wheels), versions=[kind]))
    run = subprocess.run

    def pip(command: list[str], **settings: Any) -> Any:
        if "install" not in command:
            return run(command, **settings)
        assert command[-1] == f"https://github.com/{REPO}/archive/HEAD.zip"
        where = tmp_path / "extensions" / "hf-qaudit" / "venv"
        here = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
        found = sorted(map(str, wheels.iterdir()))
        done = run(
            [sys.executable, "-m", "pip", "--python", where, "install", *here, *found], check=True
        )
        (site,) = where.glob("lib/*/site-packages")
        (site / "here.pth").write_text(sysconfig.get_path("purelib"))  # what qaudit needs
        return done

    class Builder(venv.EnvBuilder):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**{**settings, "with_pip": False})  # pip takes longest

    monkeypatch.setattr(extensions, "_github_request", on_github)
    monkeypatch.setattr(extensions, "EXTENSIONS_ROOT", tmp_path / "extensions")
    monkeypatch.setattr(extensions.shutil, "which", lambda name: None)
    monkeypatch.setattr(extensions.subprocess, "run", pip)
    monkeypatch.setattr(extensions.venv, "EnvBuilder", Builder)
    return tmp_path / "extensions"


@pytest.mark.slow
def test_the_client_installs_describes_and_runs_the_extension(
    github: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    owner, repo, short = extensions._normalize_repo_id(REPO)
    made = extensions._install_extension(owner=owner, repo_name=repo, short_name=short)
    assert (made.type, made.short_name, made.commit_sha) == ("python", "qaudit", HEAD)
    assert made.description == PROJECT["description"]
    listed = extensions.list_installed_extensions_for_help()
    assert listed == [("qaudit", f"{PROJECT['description']} [extension {REPO}]")]
    capfd.readouterr()
    known = {"auth", "cache", "download"}
    run = extensions.dispatch_unknown_top_level_extension
    assert run(["qaudit", "--version"], known) == 0
    assert capfd.readouterr().out.strip() == qaudit.__version__
    assert run(["qaudit", "publish", "--help"], known) == 0
    assert capfd.readouterr().out.startswith("Usage: hf qaudit publish ")
    assert run(["qaudit", "report", "not-there"], known) == 2


def test_the_repository_holds_no_file_that_the_client_would_run_instead() -> None:
    assert not (FOLDER / PROJECT["name"]).exists()
    assert not (FOLDER / "manifest.json").exists()


def test_the_extension_needs_a_qaudit_that_brings_its_script() -> None:
    (needed,) = map(Requirement, PROJECT["dependencies"])
    assert needed.name == "qaudit-llm"
    assert needed.specifier.contains(qaudit.__version__, prereleases=True)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["hf-qaudit"] == scripts["qaudit"]


def test_its_license_is_the_project_s() -> None:
    assert (FOLDER / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
