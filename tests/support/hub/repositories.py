"""A repo as git knows it: commits, and the branches and tags that point at them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from tests.support.hub.git import Blob, Commit, commit_of

Kind = Literal["model", "dataset"]


@dataclass
class Repository:
    """One repo of the Hub, and who may see it."""

    id: str
    kind: Kind = "model"
    private: bool = False
    gated: Literal[False, "auto", "manual"] = False
    readers: tuple[str, ...] = ()
    xet: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    discussions: list[dict[str, Any]] = field(default_factory=list)  # number = place + 1
    large: dict[str, Blob] = field(default_factory=dict)  # what LFS keeps, by sha256

    @property
    def key(self) -> str:
        """How the Hub's pages and `Hub.repos` call it."""
        return self.id if self.kind == "model" else f"datasets/{self.id}"

    @property
    def owner(self) -> str:
        return self.id.partition("/")[0]

    def commit(
        self,
        files: Mapping[str, Blob],
        title: str,
        *,
        message: str = "",
        date: datetime | None = None,
        author: str = "hub",
        parent: str | None = None,
        branch: str | None = "main",
    ) -> Commit:
        """Add a commit and move a branch there; without a `parent`, on top of its head."""
        parent = parent or (self.branches.get(branch) if branch else None)
        date = date or datetime.now(UTC)
        new = commit_of(files, title, message=message, date=date, author=author, parent=parent)
        self.commits[new.id] = new
        self.large |= {blob.sha256: blob for blob in files.values() if blob.sha256}
        if branch:
            self.branches[branch] = new.id
        return new

    def resolve(self, revision: str) -> Commit | None:
        """Return the commit that a branch, a tag, a commit's id or the start of one names."""
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        if oid not in self.commits and re.fullmatch("[0-9a-f]{7,39}", revision):
            oid = next((known for known in self.commits if known.startswith(revision)), oid)
        return self.commits.get(oid)

    def history(self, commit: Commit | None) -> Iterator[Commit]:
        """Yield a commit and those before it."""
        while commit:
            yield commit
            commit = self.commits.get(commit.parent) if commit.parent else None

    def remove(self, name: str) -> None:
        """Let a branch or tag vanish, and its commit with it unless another name points there.

        The commit is gone even where later ones name it as a parent: their history ends there.
        """
        oid = self.branches.pop(name, None) or self.tags.pop(name)
        if oid not in {*self.branches.values(), *self.tags.values()}:
            del self.commits[oid]
