"""Every command's help: in groups, with an example that parses, and the environment for all."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from qaudit.cli.app import app
from tests.house.commands import OF_THE_SHELL, commands

run = CliRunner()


COMMANDS = dict(commands())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_has_its_variable(path: tuple[str, ...]) -> None:
    options = [p for p in COMMANDS[path].params if p.param_type_name == "option"]
    for option in options:
        if option.name in OF_THE_SHELL:
            continue
        long = max(option.opts, key=len).removeprefix("--").replace("-", "_").upper()
        assert option.envvar == f"QAUDIT_{long}", option.opts


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_has_an_example_that_parses(path: tuple[str, ...]) -> None:
    text = run.invoke(app, [*path, "--help"]).stdout
    (example,) = (line for line in text.splitlines() if line.strip().startswith("Example:"))
    words = shlex.split(example.partition("qaudit ")[2])
    assert words[: len(path)] == list(path)
    command = COMMANDS[path]
    command.make_context(path[-1], words[len(path) :], resilient_parsing=False)


def test_options_stand_in_groups_and_the_environment_is_said_once() -> None:
    text = run.invoke(app, ["scan", "--help-all"], env={"COLUMNS": "80"}).stdout
    groups = [line.rstrip(":") for line in text.splitlines() if line and line[0].isupper()]
    assert groups[1:6] == ["Arguments", "What to measure", "Text", "How to compute", "Output"]
    assert "env var" not in text
    assert "QAUDIT_DISK_BUDGET=60GB" in text.replace("\n", " ")
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_help_of_many_options_shows_the_first_ten() -> None:
    text = run.invoke(app, ["scan", "--help"], env={"COLUMNS": "80"}).stdout
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert len(shown) == 10
    assert {"--quick", "--schemes", "--last", "--out", "--dry-run"} <= set(shown)
    assert "`--help-all` shows the other" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    given = {
        "bash": {"COMP_WORDS": "qaudit re", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "qaudit re"},
        "fish": {"_TYPER_COMPLETE_ARGS": "qaudit re", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    environment = {"_QAUDIT_COMPLETE": f"complete_{shell}", **given[shell]}
    answer = run.invoke(app, [], prog_name="qaudit", env=environment)
    assert "report" in answer.stdout
