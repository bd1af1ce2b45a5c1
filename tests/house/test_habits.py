"""Files that other tools read: pre-commit, Dependabot, citations, the targets of the Makefile."""

from __future__ import annotations

import re
import shlex

import pytest
import typer.main
import yaml

from qaudit.cli.app import app
from tests.house.source import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def read(name: str) -> object:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_pre_commit_runs_the_versions_of_the_lock() -> None:
    locked = (ROOT / "requirements" / "dev.lock").read_text(encoding="utf-8").splitlines()
    (local,) = read(".pre-commit-config.yaml")["repos"]
    pins = [pin for hook in local["hooks"] for pin in hook["additional_dependencies"]]
    assert {pin.partition("==")[0] for pin in pins} == {"ruff", "codespell", "zizmor"}
    assert [pin for pin in pins if pin not in locked] == []


def test_the_hook_for_other_repositories_is_a_gate() -> None:
    (hook,) = read(".pre-commit-hooks.yaml")
    assert not hook["pass_filenames"]
    _, command, *rest = shlex.split(hook["entry"])
    gate = typer.main.get_command(app).commands[command]
    gate.make_context(command, [*rest, "audits/candidate", "--policy", "ci/policy.yaml"])
    assert re.search(hook["files"], "audits/candidate/audit.json")
    assert not re.search(hook["files"], "README.md")


def test_dependabot_updates_the_actions() -> None:
    (update,) = read(".github/dependabot.yml")["updates"]
    assert update["package-ecosystem"] == "github-actions"
    assert all((ROOT / folder.strip("/")).is_dir() for folder in update["directories"])


def test_the_citation_has_what_the_format_requires() -> None:
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for paper in citation["references"]:
        (number,) = paper["identifiers"]
        assert number["value"].removeprefix("arXiv:") in readme


def test_the_inner_loop_runs_folders_that_exist() -> None:
    folders = re.search(r"^QUICK := \$\(addprefix tests/,(.*)\)$", MAKEFILE, re.M)
    assert folders
    assert [name for name in folders[1].split() if not (ROOT / "tests" / name).is_dir()] == []


@pytest.mark.parametrize("target", ["check", "test"])
def test_continuous_integration_runs_the_targets_of_the_makefile(target: str) -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert f"\nmake {target}\n" in script
    assert re.search(rf"^{target}: .*## ", MAKEFILE, re.M)
