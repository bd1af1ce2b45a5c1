"""How a process ends when something outside qaudit goes wrong: 1 means breached, nothing else."""

from __future__ import annotations

import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from qaudit.cli import main
from tests.house.test_without_torch import BLOCK
from tests.support.cli import QUICK, SEVERAL, Run, refused
from tests.support.parts import ended, start

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
def test_a_torch_that_is_missing_or_broken_is_reported_by_doctor_and_scan(
    place: Path, code: str, by_doctor: list[str], by_scan: list[str]
) -> None:
    commands = "doctor", f"scan series {' '.join(QUICK)}"
    process = start(place, *commands, main=code + SEVERAL, PYTHONWARNINGS="error")
    out, err = process.communicate()
    assert [line for line in err.splitlines() if line.isdigit()] == ["4", "4"]
    shown, said = (" ".join(text.split()) for text in (out, err))
    assert all(words in shown + " " for words in by_doctor), shown
    assert all(words in said for words in by_scan), said
    assert "bug of qaudit" not in said and "Traceback" not in said


# -------------------------------------------------------------------------------------- memory


def test_what_stops_a_command_is_no_breach(qaudit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    qaudit("gate", "out", code=2)  # imports what keeps the real `say`
    for error, code, sentence, hint in (
        (MemoryError(), 4, "memory ran out", "ulimit -v"),
        (KeyboardInterrupt(), 130, "interrupted", "qaudit gate out"),
        (ZeroDivisionError("of nothing"), 4, "this is a bug of qaudit", "report it"),
    ):
        shown: list[object] = []
        monkeypatch.setattr("qaudit.cli.terminal.say", shown.append)
        monkeypatch.setattr("qaudit.cli.gate.classes_named", Mock(side_effect=error))
        refused(qaudit("gate", "out"), code, sentence, hint)
        assert ("ZeroDivisionError: of nothing" in str(shown)) == ("bug" in sentence)


def test_a_message_that_cannot_be_printed_ends_with_4(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("_run", "terminal.complain"):
        monkeypatch.setattr(f"qaudit.cli.{name}", Mock(side_effect=MemoryError))
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 4
    assert "could not say why" in capfd.readouterr().err


@pytest.mark.parametrize("megabytes", [60, 200])
def test_no_limit_on_memory_looks_like_a_breach(tmp_path: Path, megabytes: int) -> None:
    limited = ("/bin/bash", "-c", f'ulimit -v {megabytes * 1024}; exec "$0" "$@"')
    child = start(tmp_path, "gate", "nowhere", before=limited, OPENBLAS_NUM_THREADS="1")
    _, said = child.communicate()
    assert child.returncode != 1, said


# ------------------------------------------------------------------------------------- signals


def test_a_signal_ends_with_130_and_a_way_on(qaudit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        sent = lambda *_, number=number: signal.raise_signal(number)  # noqa: E731
        monkeypatch.setattr("qaudit.planning.prepare.prepare", sent)
        done = qaudit("scan", "nowhere", "--out", "out")
        refused(done, 130, "interrupted; nothing is kept yet", "run the same command again: qaudit")


def test_a_signal_while_modules_load_prints_no_traceback(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom qaudit.cli import main\n"
        "class Find:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Find())\nmain()"
    )
    child = start(tmp_path, "--help", main=code, PYTHONWARNINGS="error")
    assert "Traceback" not in ended(child, 130)
