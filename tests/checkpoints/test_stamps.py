"""Hashes are remembered exactly as long as they are right."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from qaudit.checkpoints import stamps
from qaudit.checkpoints.stamps import (
    SETTLED_NS,
    Stamp,
    computed_hash,
    hash_of,
    known_hash,
    own_cache,
)


def later() -> int:
    """Return a time at which every file of this test has been left alone long enough."""
    return 1 << 62


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that grows whenever a file is read to be hashed."""
    seen: list[Path] = []

    def watched(path: Path, kind: stamps.HashKind = "sha256") -> str:
        seen.append(path)
        return computed_hash(path, kind)

    monkeypatch.setattr(stamps, "computed_hash", watched)
    return seen


def test_a_file_is_read_once(weights: Path, reads: list[Path]) -> None:
    found = {hash_of(weights, now_ns=later) for _ in range(3)}
    assert found == {hashlib.sha256(b"weights").hexdigest()}
    assert len(reads) == 1


def test_a_link_shares_the_memory_of_its_file(weights: Path, reads: list[Path]) -> None:
    link = weights.with_name("link.safetensors")
    link.symlink_to(weights)
    assert hash_of(link, now_ns=later) == hash_of(weights, now_ns=later)
    assert len(reads) == 1


def test_a_file_that_just_changed_is_not_remembered(weights: Path, reads: list[Path]) -> None:
    changed = weights.stat().st_ctime_ns
    hash_of(weights, now_ns=lambda: changed + SETTLED_NS)
    assert known_hash(weights) is None
    hash_of(weights, now_ns=lambda: changed + SETTLED_NS + 1)
    assert known_hash(weights) is not None
    assert len(reads) == 2


def test_other_bytes_of_equal_length_and_date_are_another_file(weights: Path) -> None:
    hash_of(weights, now_ns=later)
    before = weights.stat()
    while weights.stat().st_ctime_ns == before.st_ctime_ns:  # until the clock has ticked
        weights.write_bytes(b"WEIGHTS")
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_mtime_ns == before.st_mtime_ns
    assert known_hash(weights) is None
    assert hash_of(weights) == hashlib.sha256(b"WEIGHTS").hexdigest()


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, kind: stamps.HashKind = "sha256") -> str:
        found = computed_hash(path, kind)
        path.write_bytes(b"longer weights")
        return found

    monkeypatch.setattr(stamps, "computed_hash", read)
    hash_of(weights, now_ns=later)
    assert known_hash(weights) is None


@pytest.mark.parametrize("damage", ["", "[]", "{}", "null", '{"stamp": 1}', "\0"])
def test_a_damaged_memory_is_none(weights: Path, damage: str) -> None:
    found = hash_of(weights, now_ns=later)
    (place,) = (own_cache() / "stamps").iterdir()
    place.write_text(damage)
    assert known_hash(weights) is None
    assert hash_of(weights, now_ns=later) == found == known_hash(weights)


def test_a_memory_that_cannot_be_written_costs_only_time(
    weights: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QAUDIT_CACHE", str(tmp_path / "file" / "cache"))
    assert hash_of(weights, now_ns=later) == hashlib.sha256(b"weights").hexdigest()
    assert known_hash(weights) is None


def test_git_ids_are_those_of_git(weights: Path) -> None:
    git = subprocess.run(
        ["git", "hash-object", weights], check=True, capture_output=True, text=True
    )
    assert hash_of(weights, "git") == git.stdout.strip()


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hash_of(tmp_path / "nothing")


def test_another_mount_of_the_same_file_has_the_same_stamp(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    status = (tmp_path / "a").stat()
    names = [name for name in dir(status) if name.startswith("st_")]
    there = SimpleNamespace(**{name: getattr(status, name) for name in names})
    there.st_dev += 1  # each mount of a network share has a number of its own
    assert Stamp._of(there) == Stamp.of(tmp_path / "a")
