"""One commit as it shall be: files by their bytes and hashes, and what it goes upon."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from qaudit.hub.entries import HubFile


@dataclass(frozen=True)
class Addition:
    """A file as it shall be."""

    path: str
    data: bytes = field(repr=False)

    @cached_property
    def sha256(self) -> str:
        """Hash the bytes."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def git_id(self) -> str:
        """Hash the bytes as git does."""
        blob = b"blob %d\0" % len(self.data) + self.data
        return hashlib.sha1(blob, usedforsecurity=False).hexdigest()

    def is_there(self, listed: Mapping[str, HubFile]) -> bool:
        """Say whether a tree holds these very bytes at this path."""
        found = listed.get(self.path)
        if found is None:
            return False
        return found.blob == (self.git_id if found.sha256 is None else self.sha256)


@dataclass(frozen=True)
class PullRequest:
    """A pull request of a repository."""

    number: int
    title: str
    url: str

    @property
    def revision(self) -> str:
        """Name the branch that holds what it proposes."""
        return f"refs/pr/{self.number}"


@dataclass(frozen=True)
class Change:
    """One commit: what it goes upon, what it says, and what it adds and removes."""

    repo: str
    parent: str  # a full commit
    title: str
    description: str
    additions: tuple[Addition, ...]
    removed: tuple[str, ...] = ()
    onto: PullRequest | None = None  # None: opens one

    @property
    def branch(self) -> str:
        """Name the branch that is committed to, or that a new pull request is for."""
        return self.onto.revision if self.onto else "main"
