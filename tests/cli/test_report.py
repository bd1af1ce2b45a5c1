"""Saved audits on the command line: rendered, compared, explained; and help."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qaudit.cli.app import app
from qaudit.core.registry import merges, schemes
from qaudit.saved.audits import to_json
from qaudit.version import __version__
from tests.house.commands import OF_THE_SHELL, commands
from tests.support import sample
from tests.support.cli import ROUNDED, TEXT, audit_of
from tests.support.saved_audits import stub_pictures


def test_a_scan_and_its_report_say_the_same(scan, qaudit, place):
    summary = scan("series/step10", "series/step200").out
    assert qaudit("report", "out", "--format", "terminal").out == summary
    card = (place / "out" / "card.md").read_text(encoding="utf-8")
    assert qaudit("report", "out/audit.json").out.strip() == card.strip()
    document = (place / "out" / "audit.json").read_text(encoding="utf-8")
    assert qaudit("report", "out", "--format", "json").out == document


def test_without_matplotlib_the_page_has_the_saved_pictures(saved, qaudit, monkeypatch):
    monkeypatch.setattr("qaudit.cli.report.find_spec", lambda name: None)
    monkeypatch.setattr("qaudit.report.folder.find_spec", lambda name: None)
    stub_pictures(sample.audit(), saved / "out" / "plots")
    done = qaudit("report", "out", "--format", "html")
    assert "<svg aria-label=" in done.out and "no picture was drawn" not in done.out
    assert "matplotlib is not installed: the pictures are those in out/plots" in done.err
    (saved / "out" / "plots" / "trajectory.svg").unlink()
    assert "no picture was drawn" in qaudit("report", "out", "--format", "html").out


def test_what_is_registered_is_listed_one_a_line(qaudit):
    for kind, names in (("schemes", schemes()), ("merges", merges())):
        done = qaudit("list", kind)
        lines = [line.partition(" [")[0] for line in done.out.splitlines()]
        assert [line.split()[0] for line in lines] == list(names)
        assert all(line.endswith(".") for line in lines) and (done.code, done.err) == (0, "")
    assert any(line.startswith("olmo2") for line in qaudit("list", "families").out.splitlines())
    assert qaudit("list").out == qaudit("list", "schemes").out
    assert "[bits, group=128, sym=true, scale_dtype=bf16]" in qaudit("list").out
    done = qaudit("--version")
    assert (done.code, done.out, done.err) == (0, f"{__version__}\n", "")
    done = qaudit()
    assert "scan" in done.out + done.err
    assert done.code in (0, 2)


def test_a_card_goes_into_a_readme_and_is_replaced_there(saved, qaudit):
    readme = saved / "model" / "README.md"
    readme.parent.mkdir()
    readme.write_bytes(b"---\r\nlicense: mit\r\n---\r\n# A model\r\n")
    into = ("report", "out", "--into", readme, "--plots", "model/qaudit/plots")
    done = qaudit(*into)
    assert (done.code, done.out, "wrote the card into" in done.err) == (0, "", True)
    once = readme.read_bytes()
    text = b"---\r\nlicense: mit\r\n---\r\n# A model\r\n\r\n<!-- qaudit:begin -->\r\n"
    assert once.startswith(text)
    assert b'src="qaudit/plots/trajectory.svg"' in once
    assert (readme.parent / "qaudit" / "plots").is_dir()
    assert b"\n" not in once.replace(b"\r\n", b"")
    qaudit(*into)
    assert readme.read_bytes() == once
    assert [path.name for path in readme.parent.iterdir() if path.is_file()] == ["README.md"]


def test_a_readme_has_lines_of_text_until_pictures_are_drawn(saved, qaudit):
    assert "no pictures in out/plots" in qaudit("report", "out", "--into", "NEW.md").err
    text = (saved / "NEW.md").read_text(encoding="utf-8")
    assert "![" not in text and "```text\nAlong the series" in text
    assert qaudit("report", "out", "--sparklines").out.strip() == text.strip()
    qaudit("report", "out", "--format", "terminal", "--plots", "pictures", code=0)
    assert {"trajectory.png", "soups.svg"} <= {p.name for p in (saved / "pictures").iterdir()}
    (saved / "file").write_text("", encoding="utf-8")
    assert qaudit("report", "out", "--plots", "file/pictures").code == 4


def test_two_scans_are_compared_and_the_exit_code_is_0(qaudit, exported):
    scan = ("scan", "series/step10", *TEXT, "--schemes", ROUNDED, "--out", "before", "-q")
    assert qaudit(*scan).code == 0
    done = qaudit("diff", "before", "out", code=0)
    assert "Losses: 2 unchanged. Added losses: 1 unchanged." in " ".join(done.out.split())
    assert ("- b: rtn-3bit" in done.out, done.err) == (True, "")
    found = json.loads(qaudit("diff", "before", "out", "--format", "json").out)
    assert (found["paired"], found["a"], found["b"]) == (True, "before", "out")
    assert "b is `out`" in qaudit("diff", "before", "out", "--format", "md").out
    # The same numbers with an edited audit, then without evidence.
    text = json.dumps(audit_of(Path("out"))).replace('"ce": ', '"ce": 1', 1)
    Path("out/audit.json").write_text(text, encoding="utf-8")
    assert qaudit("diff", "before", "out").code == 2
    shutil.rmtree("before/evidence")
    assert qaudit("diff", "before", "before").code == 4


def test_a_name_is_explained(qaudit, tmp_path):
    rule = "{name: ours, metric: kl, subjects: '@ships', margin: 0.1 nats}"
    (tmp_path / "ours.yaml").write_text(f"rules: [{rule}]")
    for names, words in (
        ("four-bit-tail", ("a rule about kl_p999", "1 nat in release (warn)", "(QA038)")),
        ("qa029", ("QA029: one document carries much of the added loss",)),
        ("kl", ("kl (QA037)", "What to do: ship another subject or scheme")),
        ("gptq-4bit", ("gptq:bits=4", "Round columns in turn")),
        (f"ours --policy {tmp_path}/ours.yaml", ("kl, with a margin of 0.1 nats in ours",)),
    ):
        done = qaudit("explain", *names.split(), code=0)
        assert all(text in " ".join(done.out.split()) for text in words)
        assert max(map(len, done.out.splitlines())) <= 80 or ":" in done.out
    # An audit explains its notes and the rules of its policy.
    audit = sample.audit()
    recipe = replace(audit.plan.recipe, policy="ours.yaml")
    rows = (replace(audit.measurements[0], notes=("2 linears are left",)), *audit.measurements[1:])
    plan = replace(audit.plan, recipe=recipe)
    (tmp_path / "audit.json").write_text(to_json(replace(audit, plan=plan, measurements=rows)))
    done = qaudit("explain", "ours", "LINEARS are left", "--audit", tmp_path)
    text = " ".join(done.out.split())
    assert "ours is a rule about kl" in text
    assert f"2 linears are left: a note about {rows[0].subject} at {rows[0].scheme}. QA003" in text


# --------------------------------------------------------------------------------------------- help

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
