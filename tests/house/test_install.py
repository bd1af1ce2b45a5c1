"""How qaudit is installed: under which name, and without torch.

The distribution is `qaudit-llm`; on PyPI `qaudit` is another project.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from qaudit.light import lock_file
from qaudit.support.keys import EXTRAS
from tests.house.source import ROOT, tracked_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = PROJECT["name"]
OWN = re.compile(  # further ones repair torch, bring a plug-in, or are written by a function
    r"'?qaudit-|--no-deps qaudit-llm|--force-reinstall torch|'\{distribution\}'|\{shlex"
)
LOCK = ROOT / "requirements" / "judge.lock"
LIGHT = 'pip install --no-deps qaudit-llm && pip install --no-deps -r "$(python -m qaudit.light)"'

INSTALLER = re.compile(r"(?:pip3? install|pipx? (?:install|run)|uvx|uv (?:add|tool|pip))\b(.*)")
REQUIREMENT = re.compile(r"(?<![\w./-])qaudit(?![\w./-])(?=\s*(?:\[|[=<>~!]=|[\"'`$]|\s|$))")
PINNED = re.compile(r"(?<![\w./-])qaudit(?:\[\w+\])?(?:==|>=|~=)")


def stranger(line: str) -> bool:
    """Return whether a line would install the other project."""
    installed = [REQUIREMENT.search(rest.partition("&&")[0]) for rest in INSTALLER.findall(line)]
    return any(installed) or bool(PINNED.search(line))


def test_the_distribution_is_not_the_other_project() -> None:
    assert NAME == "qaudit-llm"


def test_every_install_line_names_the_distribution() -> None:
    lines = [
        (path, number, line)
        for path in tracked_files()
        if path.suffix in {".md", ".py", ".toml", ".yml", ".yaml", ".sh", ".ipynb", ".lock", ""}
        and path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]
    assert sum("qaudit-llm" in line for _, _, line in lines) > 10
    wrong = [f"{p.relative_to(ROOT)}:{n}: {line}" for p, n, line in lines if stranger(line)]
    assert wrong == []


def test_the_pages_show_the_command_that_installs_without_torch() -> None:
    for page in ("docs/gating.md", "qaudit/light.py"):
        assert LIGHT in (ROOT / page).read_text(encoding="utf-8"), page
    for file in ("action.yml", "docs/ci/gitlab.yml"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert "--no-deps" in text and "-m qaudit.light" in text, file


def test_every_hint_to_install_names_an_extra_of_this_distribution() -> None:
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


def test_a_checkout_names_its_lock() -> None:
    assert lock_file() == LOCK


def test_a_wheel_without_dependencies_names_the_lock_inside_it(
    wheel_file: Path, tmp_path: Path
) -> None:
    assert wheel_file.name.startswith("qaudit_llm-")
    assert wheel_file.stat().st_size < 27e6
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--no-compile", wheel_file], check=True)
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-m", "qaudit.light"]
    done = subprocess.run(command, cwd=tmp_path, env=bare, check=True, capture_output=True)
    inside = Path(done.stdout.decode().strip())
    assert inside.is_relative_to(tmp_path / "venv")
    assert inside.read_bytes() == LOCK.read_bytes()
