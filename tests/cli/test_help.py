"""Every command's help: short, in groups, with an example that parses."""

import re
import shlex

import pytest
from typer.testing import CliRunner

from qaudit.cli.app import app
from tests.house.commands import OF_THE_SHELL, commands

run = CliRunner()
COMMANDS = dict(commands())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_is_short_with_an_example_and_variables_for_options(path):
    command = COMMANDS[path]
    options = [p for p in command.params if p.param_type_name == "option"]
    for option in options:
        long = max(option.opts, key=len).removeprefix("--").replace("-", "_").upper()
        assert option.name in OF_THE_SHELL or option.envvar == f"QAUDIT_{long}", option.opts
    for how, most in (("--help", 10), ("--help-all", 20)):
        text = run.invoke(app, [*path, how], env={"COLUMNS": "80"}).stdout
        shown = [line for line in text.splitlines() if re.match("  (-., )?--", line)]
        assert len(shown) - 1 <= most  # one of them is `--help`
        assert all(len(line) <= 80 for line in text.splitlines())
    assert len(options) <= 20
    (example,) = (line for line in text.splitlines() if line.strip().startswith("Example:"))
    words = shlex.split(example.partition("qaudit ")[2])
    assert words[: len(path)] == list(path)
    command.make_context(path[-1], words[len(path) :], resilient_parsing=False)


def test_commands_and_their_options_stand_in_groups():
    text = run.invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    order = re.findall(r"^(?:  ([a-z]+)  |([A-Z][^:]+):$)", text, re.M)
    words = [name or title for name, title in order]
    assert "..." not in text.partition("Commands:")[2]  # no sentence is cut
    assert max(map(len, text.splitlines())) <= 80
    assert words[1:8] == ["Commands", "scan", "pick", "gate", "export", "verify", "report"]
    assert words[-3:] == ["The model's own text", "rollouts", "import"]
    # A scan shows the options that people set first.
    text = run.invoke(app, ["scan", "--help"], env={"COLUMNS": "80"}).stdout
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert {*shown} == {
        "--schemes", "--checkpoints", "--soup", "--evaluation", "--calibration", "--policy",
        "--quick", "--out", "--dry-run", "--set",
    }  # fmt: skip
    assert "`--help-all` shows the other 10 options" in text
    whole = run.invoke(app, ["scan", "--help-all"], env={"COLUMNS": "80"}).stdout
    groups = [line.rstrip(":") for line in whole.splitlines() if line and line[0].isupper()]
    assert groups[1:5] == ["Arguments", "What to measure", "Text", "Output"]
    assert whole.count("QAUDIT_OUT=DIR") == 1


def test_shells_complete_commands(qaudit):
    for shell, given in {
        "bash": {"COMP_WORDS": "qaudit re", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "qaudit re"},
        "fish": {"_TYPER_COMPLETE_ARGS": "qaudit re", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }.items():
        environment = {"_QAUDIT_COMPLETE": f"complete_{shell}", **given}
        assert "report" in run.invoke(app, [], prog_name="qaudit", env=environment).stdout
    # The doctor fits a terminal.
    words = qaudit("doctor").out.splitlines()
    assert [line for line in words if len(line) > 80 and re.search(r"\S\s\S.*\s", line[22:])] == []
