"""A file is there whole or not at all, and nothing lies beside it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from qaudit.errors import MachineError
from qaudit.whole import read_regular, whole_folder, write_whole


def test_what_is_written_is_what_was_given_line_ends_and_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_whole(path, "one\r\ntwo\n")
    assert path.read_bytes() == b"one\r\ntwo\n"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["pathlib.Path.replace", "os.fsync"])
def test_what_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(broken, full)
        with pytest.raises(MachineError, match="no space left"):
            write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["fifo", "device", "link to a device", "folder"])
def test_only_regular_files_and_new_names_are_written(tmp_path: Path, kind: str) -> None:
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


def test_a_loop_of_links_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "a")
    with pytest.raises(MachineError, match="cannot be written"):
        write_whole(tmp_path / "a", "new")


def test_text_that_utf8_does_not_have_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="surrogates not allowed"):
        write_whole(tmp_path / "a", "\ud800")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_more_bytes_than_are_expected_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_regular(tmp_path / "a", 4)


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "a.b") as partial:
        (partial / "x").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with whole_folder(tmp_path / "a.b") as one, whole_folder(tmp_path / "a.c") as other:
        assert one != other
        (one / "x").write_text("whole")
    assert (tmp_path / "a.b" / "x").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b", "a.c"]


def test_what_a_kill_left_of_a_folder_goes_and_what_another_host_writes_stays(
    tmp_path: Path,
) -> None:
    dead, living, other = (tmp_path / f".{n}.partial" for n in ("a.n1-00", "a.n2-11", "b.n1-22"))
    for folder in (dead, living, other):
        folder.mkdir()
        (folder / "model-00001.safetensors").touch()
        os.utime(folder / "model-00001.safetensors", (0, 0))
        os.utime(folder, (0, 0))
    (living / "model-00002.safetensors").touch()  # a minute ago, in a folder made long ago
    os.utime(living, (0, 0))
    with whole_folder(tmp_path / "a"):
        assert [one.exists() for one in (dead, living, other)] == [False, True, True]
