"""A file is there whole or not at all, and nothing lies beside it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from qaudit.errors import MachineError
from qaudit.whole import write_whole


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
