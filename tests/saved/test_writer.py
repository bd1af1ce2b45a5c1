"""One writer for each output folder, whatever ends the first."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qaudit.errors import MachineError
from qaudit.saved.parts import WRITER, one_writer

HOLD = """
import sys, time
from pathlib import Path
from qaudit.saved.parts import one_writer
with one_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def enter(folder: Path) -> None:
    with one_writer(folder):
        raise AssertionError


@pytest.fixture
def other(tmp_path: Path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_writer_is_refused_with_the_first_ones_process_and_host(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with pytest.raises(MachineError, match=f"written by process {other.pid} on ") as refusal:
        enter(tmp_path / "out")
    assert "--out" in refusal.value.hint


def test_a_killed_writer_holds_nothing(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    with one_writer(tmp_path / "out"):
        assert f'"pid": {os.getpid()}' in (tmp_path / "out" / WRITER).read_text()
    with one_writer(tmp_path / "out"):
        pass


def test_a_folder_that_takes_no_lock_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(MachineError, match="cannot be written"), one_writer(tmp_path / "out"):
        raise AssertionError


@pytest.mark.parametrize("text", ["", "[]", '{"pid": "x"}', '{"pid": 1}', "\x00"])
def test_a_damaged_record_of_the_writer_is_another_process(
    tmp_path: Path, other: subprocess.Popen[str], text: str
) -> None:
    (tmp_path / "out" / WRITER).write_text(text)
    with pytest.raises(MachineError, match="written by another process"):
        enter(tmp_path / "out")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_written_to_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with one_writer(tmp_path / "out"):
        (tmp_path / "out" / "a").write_text("x")
    with one_writer(tmp_path / "out"):  # no marker of the one before is in the way
        pass
