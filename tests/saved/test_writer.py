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
from qaudit.saved.parts import one_writer

HOLD = """
import sys, time
from pathlib import Path
from qaudit.saved.parts import one_writer
with one_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path: Path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_writer_is_refused_until_the_first_was_killed_and_without_a_folder(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    out = tmp_path / "out"
    said = "written by another process"
    with pytest.raises(MachineError, match=said) as refusal, one_writer(out):
        raise AssertionError
    assert "--out" in refusal.value.hint
    other.send_signal(signal.SIGKILL)
    other.wait()
    for _ in range(2):
        with one_writer(out):
            pass
    (tmp_path / "file").write_text("a file")
    with pytest.raises(MachineError, match="cannot be written"), one_writer(tmp_path / "file"):
        raise AssertionError


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
