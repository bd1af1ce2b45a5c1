"""The wheel holds what the package reads, the lock what the package needs, the workflows pins.

An index shows the readme without the repository beside it, and what is not known before a release
is stated once.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from hatchling.builders.wheel import WheelBuilder
from huggingface_hub.cli import extensions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import qaudit
from qaudit.light import lock_file
from qaudit.recipe.table import recipes_folder
from qaudit.support.keys import EXTRAS
from tests.house.source import PACKAGE, ROOT, tracked_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)#]+)")
UNKNOWN = re.compile(r"\bOWNER\b|\b(?:TODO|FIXME|XXX|TBD)\b")
"""The account that a release belongs to, and words for what is not finished."""


def test_the_wheel_holds_the_package_the_recipes_and_nothing_else(wheel_file):
    with zipfile.ZipFile(wheel_file) as archive:
        wheel = set(archive.namelist())
    files = [path for path in PACKAGE.rglob("*") if path.is_file()]
    needed = {
        path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts
    }
    assert needed - wheel == set()
    recipes = [path for path in (ROOT / "recipes").rglob("*") if path.is_file()]
    assert recipes
    assert {f"qaudit/recipes/{path.relative_to(ROOT / 'recipes')}" for path in recipes} <= wheel
    info = f"qaudit_llm-{qaudit.__version__}.dist-info"
    assert {name.partition("/")[0] for name in wheel} == {"qaudit", info}
    assert (recipes_folder() / "README.md").is_file()  # of this installation


def test_the_index_shows_links_that_lead_to_the_files(wheel_file, tmp_path):
    with zipfile.ZipFile(wheel_file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        shown = Parser().parsestr(archive.read(name).decode()).get_payload()
    links, files = LINK.findall(shown), LINK.findall(README)
    assert len(links) == len(files) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    for link, file in zip(links, files, strict=True):
        kind = "raw" if file.endswith(".png") else "blob"
        place = f"{PROJECT['urls']['Repository']}/{kind}/main/{file}"
        assert link in (file, place)
    for path in (ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "packaging", tmp_path / "packaging")
    (tmp_path / "qaudit").mkdir()
    (tmp_path / "qaudit" / "version.py").write_text('__version__ = "1.2.3"\n')
    page = WheelBuilder(str(tmp_path)).metadata.core.readme  # a release links to its own tag
    assert f"({PROJECT['urls']['Repository']}/blob/v1.2.3/docs/gating.md)" in page


def test_what_is_unknown_before_a_release_is_stated_once():
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
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert 'test "$address" = "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"' in text  # or is refused


def test_the_container_file_copies_what_a_build_reads(tmp_path):
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


def locked(name):
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_every_dependency_is_locked_within_its_range():
    run, dev = locked("run.lock"), locked("dev.lock")
    needed = PROJECT["dependencies"]
    for text in (*needed, *PROJECT["optional-dependencies"]["dev"]):
        requirement = Requirement(text)
        version = (run if text in needed else run | dev)[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), text
    assert re.fullmatch(r"[0-9.]+", run["torch"])  # its build is left to the index


# ---------------------------------------------------------------- under which name, without torch


OWN = re.compile(  # further ones repair torch, bring a plug-in, or are written by a function
    r"'?qaudit-|--no-deps qaudit-llm|--force-reinstall torch"
    r"|'\{(?:distribution|extra\[1\])\}'|\{shlex"
)
LOCK = ROOT / "requirements" / "judge.lock"
LIGHT = 'pip install --no-deps qaudit-llm && pip install --no-deps -r "$(python -m qaudit.light)"'

INSTALLER = re.compile(r"(?:pip3? install|pipx? (?:install|run)|uvx|uv (?:add|tool|pip))\b(.*)")
REQUIREMENT = re.compile(r"(?<![\w./-])qaudit(?![\w./-])(?=\s*(?:\[|[=<>~!]=|[\"'`$]|\s|$))")
PINNED = re.compile(r"(?<![\w./-])qaudit(?:\[\w+\])?(?:==|>=|~=)")


def stranger(line):
    """Return whether a line would install the other project."""
    installed = [REQUIREMENT.search(rest.partition("&&")[0]) for rest in INSTALLER.findall(line)]
    return any(installed) or bool(PINNED.search(line))


def test_every_install_line_names_the_distribution_also_without_torch():
    assert PROJECT["name"] == "qaudit-llm"  # on PyPI `qaudit` is another project
    lines = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in tracked_files()
        if path.suffix in {".md", ".py", ".toml", ".yml", ".yaml", ".sh", ".ipynb", ".lock", ""}
        and path != Path(__file__)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert sum("qaudit-llm" in line for line in lines) > 10
    assert [line for line in lines if stranger(line)] == []
    for page in ("docs/gating.md", "qaudit/light.py"):
        assert LIGHT in (ROOT / page).read_text(encoding="utf-8"), page
    for file in ("action.yml", "docs/ci/gitlab.yml"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert "--no-deps" in text and "-m qaudit.light" in text, file


def test_every_hint_to_install_names_an_extra_of_this_distribution():
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        names = [re.split(r"[^\w-]", requirement)[0] for requirement in extras[extra]]
        assert package.replace("_", "-") in names, package
    assert {*EXTRAS.values(), "dev"} == extras.keys()
    hints = [
        (str(path.relative_to(ROOT)), hint)
        for path in tracked_files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in ("qaudit", "plugins")
        for hint in re.findall(r"pip install ([^\n]*)", path.read_text(encoding="utf-8"))
        if "tests" not in path.parts
    ]
    assert len(hints) > 3
    assert [each for each in hints if not OWN.match(each[1])] == []


def test_a_wheel_alone_names_the_lock_inside_it(wheel_file, tmp_path):
    assert lock_file() == LOCK  # of a checkout
    assert wheel_file.name.startswith("qaudit_llm-")
    assert wheel_file.stat().st_size < 27e6
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(tmp_path / "site")  # as it is installed, without a dependency
    program = f"import sys, runpy; sys.path.insert(0, {str(tmp_path / 'site')!r}); "
    program += "runpy.run_module('qaudit.light', run_name='__main__')"
    command = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    inside = Path(done.stdout.decode().strip())
    assert inside.is_relative_to(tmp_path / "site")
    assert inside.read_bytes() == LOCK.read_bytes()


# ---------------------------------------------------------------- `hf qaudit`
# The extension's repository, installed and run by the client's own loader. GitHub is a folder here,
# and pip installs what was built from this checkout; all else - how the extension is found, what
# its program is called, how it is described and run - is the client's.


FOLDER = ROOT / "packaging" / "hf-qaudit"
EXTENSION = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPO = "someone/hf-qaudit"
COMMIT = "a" * 40


def on_github(method, url, **_):
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
        return SimpleNamespace(text=f"015e{COMMIT} HEAD\0multi_ack\n")
    assert (method, url) == ("HEAD", f"https://github.com/{REPO}")
    return SimpleNamespace()


@pytest.fixture
def github(tmp_path, monkeypatch):
    """Return where the client keeps its extensions; nothing leaves this machine."""
    wheels = tmp_path / "wheels"
    for root, kind in ((ROOT, "editable"), (FOLDER, "standard")):
        list(WheelBuilder(str(root)).build(directory=str(wheels), versions=[kind]))
    run = subprocess.run

    def pip(command, **settings):
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
        def __init__(self, **settings):
            super().__init__(**{**settings, "with_pip": False})  # pip takes longest

    monkeypatch.setattr(extensions, "_github_request", on_github)
    monkeypatch.setattr(extensions, "EXTENSIONS_ROOT", tmp_path / "extensions")
    monkeypatch.setattr(extensions.shutil, "which", lambda name: None)
    monkeypatch.setattr(extensions.subprocess, "run", pip)
    monkeypatch.setattr(extensions.venv, "EnvBuilder", Builder)
    return tmp_path / "extensions"


@pytest.mark.slow
def test_the_client_runs_the_extension(github, capfd):
    owner, repo, short = extensions._normalize_repo_id(REPO)
    made = extensions._install_extension(owner=owner, repo_name=repo, short_name=short)
    assert (made.type, made.short_name, made.commit_sha) == ("python", "qaudit", COMMIT)
    assert made.description == EXTENSION["description"]
    listed = extensions.list_installed_extensions_for_help()
    assert listed == [("qaudit", f"{EXTENSION['description']} [extension {REPO}]")]
    capfd.readouterr()
    known = {"auth", "cache", "download"}
    run = extensions.dispatch_unknown_top_level_extension
    assert run(["qaudit", "--version"], known) == 0
    assert capfd.readouterr().out.strip() == qaudit.__version__
    assert run(["qaudit", "publish", "--help"], known) == 0
    assert capfd.readouterr().out.startswith("Usage: hf qaudit publish ")
    assert run(["qaudit", "report", "not-there"], known) == 2


def test_the_extension_brings_a_script_its_license_and_nothing_that_runs_instead():
    assert not (FOLDER / EXTENSION["name"]).exists()
    assert not (FOLDER / "manifest.json").exists()
    (needed,) = map(Requirement, EXTENSION["dependencies"])
    assert needed.name == "qaudit-llm"
    assert needed.specifier.contains(qaudit.__version__, prereleases=True)
    assert PROJECT["scripts"]["hf-qaudit"] == PROJECT["scripts"]["qaudit"]
    assert (FOLDER / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
