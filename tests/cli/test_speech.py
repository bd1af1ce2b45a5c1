"""What reaches a person's terminal, a log file or a pipe: no more than it should."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from qaudit.cli.speech import Bars
from qaudit.report.json import to_json
from tests.cli.conftest import QUICK, Run, audit_of, refused, write_documents
from tests.house.test_without_torch import BLOCK, COMMAND
from tests.report import sample

RED = "\x1b[31m"
ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def controls(text: str) -> set[str]:
    return {c for c in text if not c.isprintable() and c != "\n"}


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_no_bar_is_drawn_where_nobody_looks(
    scan: Run, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    done = scan("series")
    assert "subjects" not in done.err
    assert "step200" not in done.err


def test_bars_are_drawn_on_a_terminal_and_say_what_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    console = Console(file=screen, force_terminal=True, force_interactive=True, width=100)
    monkeypatch.setattr("qaudit.cli.speech.talk", console)
    with Bars(quiet=False) as bars:
        bars.subject(0, 2, f"[/red]{RED}step10")  # neither markup nor a colour
        bars.block(1, 4, "gptq-4bit")
        bars._progress.refresh()
    drawn = screen.getvalue()
    assert "[/red]?[31mstep10" in drawn
    assert "gptq-4bit" in drawn
    assert RED not in drawn


def test_a_quiet_scan_draws_no_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with Bars(quiet=True) as bars:
        bars.subject(0, 2, "step10")
        bars.block(1, 4, "gptq-4bit")
    assert screen.getvalue() == ""


def test_no_control_character_of_a_name_is_printed(place: Path, scan: Run, qaudit: Run) -> None:
    shutil.copytree(place / "series" / "step10", place / "series" / f"step20{RED}\a")
    broken = place / "series" / f"step30{RED}\r"
    shutil.copytree(place / "series" / "step10", broken)
    (broken / "model.safetensors").write_bytes(b"oops")
    done = scan("series", "--soup", "step1000+step20*")
    assert done.code == 3
    assert "step20?[31m?" in done.out
    assert "skipped step30?[31m?: " in done.err
    card = (place / "out" / "card.md").read_text(encoding="utf-8")
    summary = qaudit("report", "out", "--format", "terminal").out
    names = "".join(path.name for path in (place / "out").rglob("*"))
    assert [controls(text) for text in (done.out, done.err, card, summary, names)] == [set()] * 5
    assert any(RED in subject["label"] for subject in audit_of(place / "out")["subjects"])


def test_no_control_character_of_a_message_is_printed(scan: Run, place: Path) -> None:
    done = scan(f"nowhere{RED}")
    refused(done, 2, "there is no folder `nowhere?[31m`", "name a folder")
    assert not controls(done.err)


def test_square_brackets_in_names_are_no_markup(scan: Run, place: Path) -> None:
    refused(scan("[red]nowhere[/bold]"), 2, "no folder `[red]nowhere[/bold]`", "name a folder")


def test_a_name_in_another_script_makes_no_noise(place: Path, scan: Run) -> None:
    shutil.copytree(place / "series" / "step10", place / "series" / "\u6a21\u578b step20")
    done = scan("series", "-q")
    assert "\u6a21\u578b step20" in done.out
    assert (done.code, done.err) == (0, "")


def process(place: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    del environment["HF_HUB_DISABLE_PROGRESS_BARS"]  # as nobody outside these tests has it
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=place,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_plan_needs_no_torch(place: Path) -> None:
    done = process(place, BLOCK + COMMAND, "scan", "series", *QUICK, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 checkpoints, 1 scheme and full precision" in done.stdout
    done = process(place, BLOCK + COMMAND, "scan", "series", *QUICK, "--dry-run", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["parameters"] > 0


@pytest.mark.parametrize(
    "arguments", [["scan", "nowhere"], ["scan", "series", "--schemes", "gtpq-4bit"]], ids=" ".join
)
def test_what_is_wrong_is_said_before_torch_is_loaded(place: Path, arguments: list[str]) -> None:
    done = process(place, BLOCK + COMMAND, *arguments)
    assert done.returncode == 2
    assert "hint: " in done.stderr
    assert "blocked" not in done.stderr


def test_a_real_process_is_as_quiet_as_it_was_asked_to_be(place: Path) -> None:
    every = ("--schemes", "gptq-4bit,awq-4bit,bnb-nf4,bnb-int8")
    write_documents(place / "calibration.jsonl", range(400, 408))
    options = ("--self-check", "--json", "-q")
    done = process(place, COMMAND, "scan", "series/step10", *QUICK, *every, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["measurements"]) == 6


@pytest.mark.parametrize("command", [["list"], ["report", "out"]], ids=" ".join)
def test_whoever_stops_reading_early_causes_no_error(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "audit.json").write_text(to_json(sample.audit()), encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
