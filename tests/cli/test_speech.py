"""What reaches a person's terminal, a log file or a pipe: no more than it should.

Where something outside qaudit goes wrong, no process ends as a breach does, with 1.
"""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from qaudit.cli import main
from qaudit.cli import progress as progress_module
from qaudit.cli.about import listing
from qaudit.cli.progress import Bars, Progress, Rates
from qaudit.cli.terminal import complain, one_line, print_result, say
from qaudit.errors import UsageError
from qaudit.report.folder import FORMATS
from tests.house.test_without_torch import BLOCK, COMMAND
from tests.support.cards import whole_at
from tests.support.cli import QUICK, SEVERAL, audit_of, refused
from tests.support.models import write_documents
from tests.support.parts import ended, start
from tests.support.saved_audits import save

RED = "\x1b[31m"
ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def terminal(monkeypatch, stream="stderr", columns=120):
    """Let a terminal stand for a stream."""
    screen = Terminal()
    monkeypatch.setattr(sys, stream, screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    return screen


def piped(monkeypatch):
    """Let a file stand for stderr."""
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes no terminal of a file
    return pipe


def controls(text):
    return {c for c in text if not c.isprintable() and c != "\n"}


def test_bars_are_drawn_on_a_terminal_below_what_is_said(monkeypatch):
    screen = terminal(monkeypatch)
    with Progress() as bars:
        bars.subject(0, 2, f"[/red]{RED}step10")  # neither markup nor a colour
        bars.block(1, 4, "gptq-4bit")
        bars.download(f"[/red]{RED}step20", 1_000_000, 14_600_000_000)
        bars.download(f"[/red]{RED}step20", 7_300_000_000, 14_600_000_000)
        bars.note(f"[bold]model.safetensors{RED} broke off")
        bars._bars.progress.refresh()
        count = len(bars._bars.progress.tasks)
        bars.download("step30", 1_000_000, 8_000_000)  # a bar in place of that of step20
        bars._bars.progress.refresh()
        assert len(bars._bars.progress.tasks) == count
    drawn = screen.getvalue()
    for words in ("[/red]?[31mstep10", "gptq-4bit", "0/2", "[/red]?[31mstep20", "7.3/14.6 GB",
                  "1.0/8.0 MB"):  # fmt: skip
        assert words in drawn
    assert RED not in drawn and "downloaded" not in drawn
    lines = drawn.splitlines()
    (said,) = (k for k, line in enumerate(lines) if "broke off" in line)
    assert lines[said].endswith("[bold]model.safetensors?[31m broke off")
    assert max(k for k, line in enumerate(lines) if "subjects" in line) > said


def test_a_quiet_scan_draws_no_bar_and_fetches_in_silence(monkeypatch):
    for stream in (terminal, piped):
        screen = stream(monkeypatch)
        with Progress(quiet=True) as bars:
            bars.subject(0, 2, "step10")
            bars.block(1, 4, "gptq-4bit")
            bars.download("step10", 10, 10)
            bars.note("model.safetensors broke off")
        assert screen.getvalue() == ""


def test_the_time_left_counts_what_takes_time(monkeypatch):
    clock = iter([0.0, 30.0, 60.0, 70.0, 80.0])
    monkeypatch.setattr("qaudit.cli.progress.time.monotonic", lambda: next(clock))
    rates = Rates()
    counted = [("blocks", 0, 8), ("blocks", 2, 8), ("blocks", 0, 8), ("batches", 0, 4),
               ("blocks", 1, 8)]  # fmt: skip
    left = [rates.left_seconds(*one) for one in counted]
    assert left == [None, 90.0, None, None, 140.0]  # the third is of the next pass
    # Of a scan the time left counts subjects that take time.
    now = [100.0]
    monkeypatch.setattr("qaudit.cli.progress.time.monotonic", lambda: now[0])
    pipe = piped(monkeypatch)
    with Progress(verbose=True) as bars:
        bars.subject(1, 4, "b")  # the first was kept
        for block in (0, 1, 0, 1, 2):  # of two passes
            bars.block(block, 2, "rtn-4bit")
            now[0] += 10
        bars.subject(2, 4, "c")
    left = [line.partition("about ")[2] for line in pipe.getvalue().splitlines()]
    # One block of two and a head took 10 s: a third of a subject; two and two thirds are left.
    assert left == ["", "", "80 s left", "3 min left", "4 min left", "2 min left", "2 min left"]


def test_without_a_terminal_there_is_a_line_for_each_checkpoint_and_now_and_then(monkeypatch):
    pipe = piped(monkeypatch)
    with Progress() as bars:
        bars.subject(0, 2, "step10")
        for done in (0, 5, 10, 10):
            bars.download("step10", done * 10**8, 10**9)
        bars.note("model.safetensors broke off")
        bars.download("step20", 10**9, 10**9)
    assert pipe.getvalue().splitlines() == [
        "[1/2] step10",
        "step10: 1.0 GB downloaded and verified",
        "model.safetensors broke off",
        "step20: 1.0 GB downloaded and verified",
    ]
    pipe = piped(monkeypatch)
    with Progress(verbose=True) as bars:  # a line at every block
        bars.block(0, 2, "gptq-4bit")  # of an export
        bars.subject(0, 1, "step10")
        for done in range(3):
            bars.block(done, 2, "gptq-4bit")
    assert [line.partition(",")[0] for line in pipe.getvalue().splitlines()] == [
        "block 0/2",
        "[1/1] step10",
        *(f"[1/1] step10: block {done}/2" for done in range(3)),
    ]
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 0.05)
    pipe = piped(monkeypatch)
    with Progress() as bars:
        bars.subject(0, 2, "step10")
        bars.block(1, 4, "gptq-4bit")
        deadline = time.monotonic() + 10
        while pipe.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    first, second, third = pipe.getvalue().splitlines()[:3]
    assert (first, second) == ("[1/2] step10", third)
    assert second.startswith("[1/2] step10: block 1/4, gptq-4bit, about ")
    assert second.endswith(" left")


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_row_fits_the_terminal(width):
    name = "stage2-ingredient3-step1000-tokens3B-of-some-run"
    console = Console(width=width, file=io.StringIO(), force_terminal=True)
    bars = Bars(console)
    bars.progress.stop()
    bars.move("subjects", 3, 154, "subjects", left_seconds=7200.0)
    bars.move("blocks", 12, 128, name, "gptq-4bit:group=64")
    bars.move("fetch", 10**10, 15 * 10**9, name, left_seconds=600.0, counted="10.2/14.6 GB")
    plain = Console(width=width, file=io.StringIO(), record=True)
    plain.print(bars.progress.get_renderable())
    rows = [row.rstrip() for row in plain.export_text().splitlines() if row.strip()]
    assert len(rows) == 3  # nothing is wrapped
    assert all(len(row) <= width for row in rows)
    assert "2.0 h left" in rows[0] and "gptq-4bit" in rows[1]
    assert [name in row for row in rows] == [False, width > 80, width > 80]


def test_threads_may_all_talk_at_once(monkeypatch):
    screen = terminal(monkeypatch)
    with Progress() as bars, ThreadPoolExecutor(4) as pool:
        for k in range(200):
            pool.submit(bars.download, "step10", k, 200)
            pool.submit(bars.note, f"line {k};")
            bars.block(k, 200, "gptq-4bit")
    assert all(screen.getvalue().count(f"line {k};") == 1 for k in range(200))


def test_no_control_character_of_a_name_is_printed(place, scan, qaudit):
    shutil.copytree(place / "series" / "step10", place / "series" / f"step20{RED}\a")
    broken = place / "series" / f"step30{RED}\r"
    shutil.copytree(place / "series" / "step10", broken)
    (broken / "model.safetensors").write_bytes(b"oops")
    done = scan("series", "--soup", "step1000+step20*", code=3)
    assert "step20?[31m?" in done.out and "skipped step30?[31m?: " in done.err
    card = whole_at(place / "out")
    summary = qaudit("report", "out", "--format", "terminal").out
    names = "".join(path.name for path in (place / "out").rglob("*"))
    assert [controls(text) for text in (done.out, done.err, card, summary, names)] == [set()] * 5
    assert any(RED in subject["label"] for subject in audit_of(place / "out")["subjects"])


def process(place, code, *arguments, shell="", **how):
    """Run a command, in a shell if a line of one follows it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **how.pop("env", {})}
    del environment["HF_HUB_DISABLE_PROGRESS_BARS"]  # as nobody outside these tests has it
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    command = ["/bin/sh", "-c", f'"$0" "$@" {shell}', *command] if shell else command
    return subprocess.run(command, cwd=place, env=environment, text=True, check=False, **streams)


def test_plans_gates_and_what_is_wrong_with_them_need_no_torch(place):
    save(place / "saved")
    plan = f"scan series {' '.join(QUICK)} --dry-run"
    wrong = ("scan nowhere", "scan series --schemes gtpq-4bit")
    gate = "gate saved --policy explore"
    done = process(place, BLOCK + SEVERAL, plan, f"{plan} --json", gate, *wrong)
    text, _, table = done.stdout.partition("{")
    assert "3 checkpoints, 1 scheme and full precision" in text
    plan_of, end = json.JSONDecoder().raw_decode("{" + table)
    assert plan_of["parameters"] > 0
    assert "by the policy explore: ship " in table[end:]
    lines = done.stderr.splitlines()
    assert lines[:3] == ["0"] * 3  # and nothing said
    assert [line for line in lines if line.isdigit()] == ["0", "0", "0", "2", "2"]
    assert done.stderr.count("hint: ") == 2
    assert "blocked" not in done.stderr


@pytest.mark.slow
def test_a_real_process_is_as_quiet_as_it_was_asked_to_be(place):
    every = ("--schemes", "gptq-4bit,awq-4bit,bnb-nf4,bnb-int8")
    write_documents(place / "calibration.jsonl", range(400, 408))
    options = ("--json", "-q")
    done = process(place, COMMAND, "scan", "series/step10", *QUICK, *every, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["measurements"]) == 6


def test_no_message_and_no_result_starts_a_workflow_command_or_holds_a_control_character(capsys):
    say("::error::a\n  ::b\nc ##[d")
    print_result("::error::a\n\t::b\nc ##[d")
    print_result("::error::a", workflow_commands=True)
    said = capsys.readouterr()
    assert said.err == "?:error::a\n  ?:b\nc ?#[d\n"
    assert said.out == "?:error::a\n\t?:b\nc ?#[d\n::error::a\n"
    assert one_line("a\n::b\r\x1b") == "a ::b ?"
    print_result(f"a{RED}b\x9b31m\r\u202ec\u2028\udc80 \ttab\nline")  # what renderers let through
    assert capsys.readouterr().out == "a?[31mb?31m??c?? \ttab\nline\n"


HOSTILE = f"[red]x\n::error::y\n##[error]z{RED}"


HOSTILE_WORDS = (
    "scan HOSTILE", "scan demo --schemes HOSTILE", "scan demo --dry-run --checkpoints HOSTILE",
    "scan demo --set dtype=HOSTILE", "scan demo --set stream_memory=HOSTILE",
    "scan demo --HOSTILE", "scan demo --set context=HOSTILE", "series HOSTILE", "pick HOSTILE",
    "pick demo --objective HOSTILE", "gate HOSTILE", "gate out --policy HOSTILE",
    "gate out --format HOSTILE", "gate HOSTILE --format github", "gate HOSTILE --format sarif",
    "diff HOSTILE out", "diff out out --format HOSTILE", "soup HOSTILE --out soup",
    "report HOSTILE", "report out --format HOSTILE", "publish out HOSTILE", "list HOSTILE",
    "HOSTILE",
)  # fmt: skip


def test_foreign_text_in_a_refusal_is_one_line(qaudit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in HOSTILE_WORDS:
        done = qaudit(*(word.replace("HOSTILE", HOSTILE) for word in command.split()))
        assert done.code not in (0, 1), command
        lines = [line for line in done.err.splitlines() if line]
        assert not any(line.lstrip().startswith("::") or "##[" in line for line in lines), command
        assert lines[0].startswith("error: "), command
        assert len(lines) <= 2, command  # the error and its hint
        assert not controls(done.err), command


def test_whoever_stops_reading_early_causes_no_error(saved):
    for command, stream, code in (("gate nowhere", "stderr", 2), ("report out", "stdout", 0)):
        reader, writer = os.pipe()
        os.close(reader)
        done = process(saved, COMMAND, *command.split(), **{stream: writer})
        os.close(writer)
        assert (done.returncode, done.stderr or "") == (code, "")
    # Where nobody listens the code is the same.
    for ending in (">&- 2>&-", "2>/dev/full"):
        done = process(saved, COMMAND, "gate", "nowhere", shell=ending)
        assert (done.returncode, done.stderr) == (2, "")
    done = process(saved, COMMAND, "list", "schemes", shell=">/dev/full")
    assert done.returncode == 4
    assert done.stderr.startswith("error: `output`: no space left on device\n")
    assert "Exception ignored" not in done.stderr


def test_a_terminal_of_ascii_alone_gets_every_command(saved):
    """All in one process: each says something beyond ASCII somewhere."""
    forms = [f"report out --format {form}" for form in FORMATS]
    lists = [f"list {kind}" for kind in ("schemes", "families", "recipes", "rules")]
    commands = [*forms, *lists, "--help", "scan --help", "series m\u00f6del", "nop\u00e9"]
    code = 'import sys; sys.modules["matplotlib"] = None  # which would draw\n' + SEVERAL
    done = process(saved, code, *commands, env={"PYTHONIOENCODING": "ascii"})
    assert "Traceback" not in done.stderr
    codes = [line for line in done.stderr.splitlines() if line.isdigit()]
    assert codes == ["0"] * (len(commands) - 2) + ["2", "2"]
    assert done.stdout.isascii()
    assert re.search(r"gptq-4bit +_[_.:;=+*#]+# ", done.stdout)


def test_lists_come_as_lines_names_and_json_and_fit_a_terminal(qaudit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # a line is never broken: `grep` finds all of an entry
    for kind in ("schemes", "sets", "rules", "policies", "diagnostics"):
        told = json.loads(qaudit("list", kind, "--json").out)
        assert qaudit("list", kind, "-q").out.split() == list(told)
        lines = qaudit("list", kind).out.splitlines()
        assert [line.split(maxsplit=1) for line in lines] == [[k, v] for k, v in told.items()]
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", Terminal())
            lines = listing(kind).splitlines()
        assert max(map(len, lines)) <= 80
        assert " ".join(lines).split() == " ".join(f"{k} {v}" for k, v in told.items()).split()


def test_lines_break_between_words_and_the_verdict_has_a_colour_on_a_terminal(monkeypatch):
    screen = terminal(monkeypatch, columns=20)
    monkeypatch.setenv("NO_COLOR", "1")
    complain(UsageError("there is no policy `my policy`", hint="again: qaudit scan a b c d e f"))
    assert screen.getvalue() == (
        "error: there is no\npolicy `my policy`\n\nhint: again:\nqaudit scan a b c d e f\n"
    )
    monkeypatch.delenv("NO_COLOR")
    for variable, word in (("PLAIN", "\x1b[1;32mSHIP\x1b[0m"), ("NO_COLOR", "SHIP")):
        monkeypatch.setenv(variable, "1")
        screen = terminal(monkeypatch, "stdout")
        print_result("SHIP 4 bits of HOLD")
        assert screen.getvalue() == f"{word} 4 bits of HOLD\n"


BROKEN_TORCH = """
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

class Broken(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "torch" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec("raise OSError('libcudart.so.12: cannot open shared object file')", vars(module))

sys.meta_path.insert(0, Broken())
"""


MISSING = BLOCK.replace(
    'raise ImportError(f"`{name}` is blocked")', "raise ModuleNotFoundError('gone', name=name)"
)
LIBCUDART = "libcudart.so.12: cannot open shared object file"


@pytest.mark.parametrize(
    ("code", "by_doctor", "by_scan"),
    [
        (MISSING, ["torch", "install"], ["`torch`, which is not inst", "pip install qaudit-llm"]),
        (BROKEN_TORCH, [LIBCUDART, "! torch "], [LIBCUDART, "`torch` is installed and cannot be"]),
    ],
    ids=["missing", "broken"],
)
def test_a_missing_or_broken_torch_is_reported(place, code, by_doctor, by_scan):
    commands = "doctor", f"scan series {' '.join(QUICK)}"
    process = start(place, *commands, main=code + SEVERAL, PYTHONWARNINGS="error")
    out, err = process.communicate()
    assert [line for line in err.splitlines() if line.isdigit()] == ["4", "4"]
    shown, said = (" ".join(text.split()) for text in (out, err))
    assert all(words in shown + " " for words in by_doctor), shown
    assert all(words in said for words in by_scan), said
    assert "bug of qaudit" not in said and "Traceback" not in said


def test_what_stops_a_command_is_no_breach(qaudit, monkeypatch):
    qaudit("gate", "out", code=2)  # imports what keeps the real `say`
    for error, code, sentence, hint in (
        (MemoryError(), 4, "memory ran out", "ulimit -v"),
        (KeyboardInterrupt(), 130, "interrupted", "qaudit gate out"),
        (ZeroDivisionError("of nothing"), 4, "this is a bug of qaudit", "report it"),
    ):
        shown = []
        monkeypatch.setattr("qaudit.cli.terminal.say", shown.append)
        monkeypatch.setattr("qaudit.cli.gate.classes_named", Mock(side_effect=error))
        refused(qaudit("gate", "out"), code, sentence, hint)
        assert ("ZeroDivisionError: of nothing" in str(shown)) == ("bug" in sentence)


def test_a_message_that_cannot_be_printed_ends_with_4(monkeypatch, capfd):
    for name in ("_run", "terminal.complain"):
        monkeypatch.setattr(f"qaudit.cli.{name}", Mock(side_effect=MemoryError))
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 4
    assert "could not say why" in capfd.readouterr().err


@pytest.mark.parametrize("megabytes", [60, 200])
def test_no_limit_on_memory_looks_like_a_breach(tmp_path, megabytes):
    limited = ("/bin/bash", "-c", f'ulimit -v {megabytes * 1024}; exec "$0" "$@"')
    child = start(tmp_path, "gate", "nowhere", before=limited, OPENBLAS_NUM_THREADS="1")
    _, said = child.communicate()
    assert child.returncode != 1, said


def test_a_signal_ends_with_130_and_a_way_on(qaudit, monkeypatch):
    for number in (signal.SIGINT, signal.SIGTERM):
        sent = lambda *_, number=number: signal.raise_signal(number)  # noqa: E731
        monkeypatch.setattr("qaudit.planning.prepare.prepare", sent)
        done = qaudit("scan", "nowhere", "--out", "out")
        refused(done, 130, "interrupted; nothing is kept yet", "run the same command again: qaudit")


def test_a_signal_while_modules_load_prints_no_traceback(tmp_path):
    code = (
        "import os, signal, sys\nfrom qaudit.cli import main\n"
        "class Find:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Find())\nmain()"
    )
    child = start(tmp_path, "--help", main=code, PYTHONWARNINGS="error")
    assert "Traceback" not in ended(child, 130)
