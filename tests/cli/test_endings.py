"""How a process ends when something outside qaudit goes wrong: 1 means breached, nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.test_without_torch import BLOCK, COMMAND, run
from tests.support.cli import QUICK, SEVERAL, Run, refused

ROOT = Path(__file__).parents[2]

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


def process(code: str, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# ----------------------------------------------------------------------------------- libraries


def test_a_library_that_is_not_installed_is_named(place: Path) -> None:
    missing = "raise ModuleNotFoundError('gone', name=name)"
    code = BLOCK.replace('raise ImportError(f"`{name}` is blocked")', missing)
    assert code != BLOCK
    child = process(code + COMMAND, "scan", "series", *QUICK, cwd=place)
    _, err = child.communicate()
    assert child.returncode == 4
    assert "this needs `torch`, which is not installed" in err
    assert "pip install qaudit-llm" in err
    assert "Traceback" not in err


def test_a_torch_that_does_not_load_is_reported_by_doctor_and_scan(place: Path) -> None:
    commands = "doctor", f"scan series {' '.join(QUICK)}"
    child = process(BROKEN_TORCH + SEVERAL, *commands, cwd=place)
    out, err = child.communicate()
    why = "libcudart.so.12: cannot open shared object file"
    assert why in " ".join(out.split())
    assert "! torch " in out
    said = " ".join(err.split())
    assert "`torch` is installed and cannot be loaded" in said
    assert why in said
    assert [line for line in err.splitlines() if line.isdigit()] == ["4", "4"]
    assert "bug of qaudit" not in said
    assert "Traceback" not in said


def test_the_doctor_without_torch_says_what_to_install() -> None:
    done = run(BLOCK + COMMAND, "doctor")
    assert done.returncode == 4
    assert "torch" in done.stdout
    assert "install" in done.stdout
    assert "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("error", "code", "sentence", "hint"),
    [
        (MemoryError(), 4, "memory ran out", "ulimit -v"),
        (KeyboardInterrupt(), 130, "interrupted", "qaudit gate out"),
        (ZeroDivisionError("of nothing"), 4, "this is a bug of qaudit", "report it"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_stops_a_command_is_no_breach(
    qaudit: Run,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    sentence: str,
    hint: str,
) -> None:
    def stop(*_: object) -> None:
        raise error

    shown: list[object] = []
    monkeypatch.setattr("qaudit.cli.terminal.say", shown.append)
    monkeypatch.setattr("qaudit.cli.gate._judge", stop)
    refused(qaudit("gate", "out"), code, sentence, hint)
    assert ("ZeroDivisionError: of nothing" in str(shown)) == ("bug" in sentence)


def test_a_message_that_cannot_be_printed_ends_with_4(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_out(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("qaudit.cli._run", run_out)
    monkeypatch.setattr("qaudit.cli.terminal.complain", run_out)
    from qaudit.cli import main

    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 4
    assert "could not say why" in capfd.readouterr().err


@pytest.mark.parametrize("megabytes", [60, pytest.param(120, marks=pytest.mark.slow), 200, 300])
def test_no_limit_on_memory_looks_like_a_breach(tmp_path: Path, megabytes: int) -> None:
    shell = f'ulimit -v {megabytes * 1024}; exec "$0" -c "$1" gate nowhere'
    done = subprocess.run(
        ["/bin/bash", "-c", shell, sys.executable, COMMAND],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode != 1, done.stderr


# ------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_130_and_the_way_to_resume(tmp_path: Path, number: int) -> None:
    code = (
        "import sys, time\nimport qaudit.planning.prepare as p\n"
        "def prepare(*_): print('planning', flush=True); time.sleep(60)\n"
        "p.prepare = prepare\n" + COMMAND
    )
    child = process(code, "scan", "nowhere", "--out", "out", cwd=tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "planning\n"
    child.send_signal(number)
    _, err = child.communicate()
    assert child.returncode == 130
    assert "error: interrupted; nothing is kept yet" in err
    assert "run the same command again: qaudit" in err
    assert "Traceback" not in err


def test_a_signal_while_modules_load_prints_no_traceback(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom qaudit.cli import main\n"
        "class Find:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Find())\nmain()"
    )
    child = process(code, "--help", cwd=tmp_path)
    _, err = child.communicate()
    assert child.returncode == 130
    assert "Traceback" not in err
