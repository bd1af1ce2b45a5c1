"""A file is there whole or not at all, nothing lies beside it, and a folder has one writer."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qaudit.errors import MachineError
from qaudit.saved.parts import one_writer
from qaudit.whole import partial_name, read_regular, remove_stale, write_whole


def test_what_is_written_is_what_was_given_line_ends_and_all(tmp_path):
    path = tmp_path / "new" / "a.txt"
    write_whole(path, "one\r\ntwo\n")
    assert path.read_bytes() == b"one\r\ntwo\n"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["pathlib.Path.replace", "os.fsync"])
def test_what_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken):
    path = tmp_path / "a.txt"
    write_whole(path, "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(broken, full)
        with pytest.raises(MachineError, match="no space left"):
            write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["fifo", "device", "link to a device", "folder"])
def test_only_regular_files_and_new_names_are_written(tmp_path, kind):
    path = tmp_path / "a.txt"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/null")
    else:
        path.symlink_to("/dev/null")
    before = path.lstat().st_mode
    with pytest.raises(MachineError, match="not a regular file"):
        write_whole(path, "new")
    assert path.lstat().st_mode == before


def test_what_cannot_be_written_is_said_and_only_our_stale_files_removed(tmp_path):
    with pytest.raises(MachineError, match="surrogates not allowed"):
        write_whole(tmp_path / "a", "\ud800")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(MachineError, match="cannot be written"):
        write_whole(tmp_path / "loop", "new")
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_regular(tmp_path / "a", 4)
    ours, fresh = partial_name(tmp_path / "a.npz"), partial_name(tmp_path / "b.npz")
    foreign, folder = tmp_path / "thesis.partial", tmp_path / f".c{ours.suffixes[-2]}.partial"
    for path in (ours, fresh, foreign):
        path.write_text("x")
    folder.mkdir()
    link = partial_name(tmp_path / "d.npz")
    link.symlink_to(foreign)
    for path in (ours, foreign, folder):
        os.utime(path, (0, 0))
    remove_stale(tmp_path)
    remaining = [path.exists() for path in (ours, fresh, foreign, folder, link)]
    assert remaining == [False, True, True, True, True]


HOLD = """
import sys, time
from pathlib import Path
from qaudit.saved.parts import one_writer
with one_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_writer_is_refused_until_the_first_was_killed_and_without_a_folder(
    tmp_path, other
):
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
def test_a_file_system_without_locks_is_written_to_without_one(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with one_writer(tmp_path / "out"):
        (tmp_path / "out" / "a").write_text("x")
    with one_writer(tmp_path / "out"):  # no marker of the one before is in the way
        pass
