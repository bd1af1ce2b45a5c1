"""Unfinished work of an export is its own: files of others stay, and links are not followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from qaudit.errors import UsageError
from qaudit.export.contents import begun_folder, begun_path, whole_folder


def files_in(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def interrupt(out: Path, identity: str) -> None:
    with pytest.raises(KeyboardInterrupt), begun_folder(out, identity) as folder:
        (folder / "block").write_text("half")
        raise KeyboardInterrupt


def test_the_same_work_goes_on_and_its_folder_goes_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "new"
    interrupt(out, "a")
    with begun_folder(out, "a") as folder, whole_folder(out, folder) as partial:
        assert (folder / "block").read_text() == "half"
        (partial / "x").write_text("whole")
        assert not out.exists()
    assert files_in(tmp_path) == {"new/x": "whole"}


def test_what_a_killed_run_left_of_its_result_is_written_anew(tmp_path: Path) -> None:
    out = tmp_path / "new"
    interrupt(out, "a")
    (begun_path(out) / "result").mkdir()
    (begun_path(out) / "result" / "half").touch()
    with begun_folder(out, "a") as folder, whole_folder(out, folder):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]


@pytest.mark.parametrize("kind", ["files", "other work", "link", "link within", "file"])
def test_files_of_others_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    out, documents = tmp_path / "new", tmp_path / "documents"
    documents.mkdir()
    (documents / "thesis.txt").write_text("keep")
    begun = begun_path(out)
    if kind == "files":
        begun.mkdir()
        (begun / "block").write_text("keep")
    elif kind == "other work":
        interrupt(out, "b")
    elif kind == "link":
        begun.symlink_to(documents)
    elif kind == "link within":
        interrupt(out, "a")
        (begun / "result").symlink_to(documents)
    else:
        begun.write_text("keep")
    before = files_in(tmp_path)
    with pytest.raises(UsageError, match="unfinished work goes to"), begun_folder(out, "a"):
        raise AssertionError("it was taken")
    assert files_in(tmp_path) == before


def test_a_link_in_place_of_the_writer_s_file_is_not_written_through(tmp_path: Path) -> None:
    out, target = tmp_path / "new", tmp_path / "thesis.txt"
    target.write_text("keep")
    with begun_folder(out, "a") as folder:
        assert not (folder / ".qaudit.writer").is_symlink()
    begun_path(out).mkdir()
    (begun_path(out) / ".qaudit.writer").symlink_to(target)
    with pytest.raises(UsageError, match="has links in it"), begun_folder(out, "a"):
        raise AssertionError("it was taken")
    assert target.read_text() == "keep"
