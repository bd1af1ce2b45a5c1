"""Every command that a page shows is one that the command line takes, and every link leads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from qaudit.cli.app import app
from qaudit.recipe.table import find_recipe, is_recipe, read_recipe
from tests.house.commands import PAGE as OPTIONS
from tests.house.commands import commands
from tests.house.commands import page as page_of_options
from tests.house.source import ROOT

PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUP = typer.main.get_command(app)
COMMANDS_BY_NAME = dict(commands(GROUP))


def shown(page: Path) -> list[str]:
    """Return the `qaudit` commands of a page, without their comments."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ qaudit")]


COMMANDS = [(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in shown(page)]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_in_a_page_is_understood(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    if words == ["--help"]:
        return
    depth = 1 if tuple(words[:1]) in COMMANDS_BY_NAME else 2
    rest = words[depth:]
    with GROUP.make_context("qaudit", [words[0], "--help"], resilient_parsing=True) as group:
        COMMANDS_BY_NAME[tuple(words[:depth])].make_context(words[depth - 1], rest, parent=group)
    for word in rest:
        if is_recipe(word) and words[0] != "lab":
            read_recipe(find_recipe(word))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_option_a_page_speaks_of_is_there(page: Path) -> None:
    text = re.sub(r"^(#SBATCH|srun) .*", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    said = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    known = {
        option
        for command in COMMANDS_BY_NAME.values()
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= {"--help", "--help-all", "--version", "--install-completion", "--show-completion"}
    known |= {"--revision", "--no-deps", "--index-url"}  # of `hf download` and of pip
    known |= {"--pure", "--imatrix"}  # of llama-quantize
    known |= {"--account", "--gres", "--cpus-per-task", "--mem", "--time"}  # of sbatch
    assert said - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_s_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_page_of_options_is_up_to_date() -> None:
    assert OPTIONS.read_text(encoding="utf-8") == page_of_options(), "run `make readme`"


def test_every_page_stands_once_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[([\w-]+\.md)\]\(\1\): \S", index, re.M)
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert sorted(listed) == sorted(pages)


def test_there_are_commands_to_hold() -> None:
    assert len(COMMANDS) > 10
