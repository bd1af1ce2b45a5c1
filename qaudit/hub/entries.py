"""What the Hub tells of a repository: revisions, files, and a transfer that broke off.

Values only. Whatever is made here was read from a network and has been checked on the way in
(`answers`), so that a path can be joined to a folder and a size can be added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["model", "dataset"]
"""What a repository holds; spaces and the rest are of no use here."""

RESUME = "run the same command again: it goes on from here"
"""The hint for every failure that may pass with time."""


@dataclass(frozen=True)
class Revision:
    """A name that a repository gives to a commit."""

    name: str
    commit: str
    kind: Literal["branch", "tag"]


@dataclass(frozen=True)
class HubFile:
    """A file at one commit, known by the hash of its bytes before any of them is fetched."""

    path: str
    nbytes: int
    git_id: str  # of the bytes, or of the LFS pointer that stands for them
    sha256: str | None  # of the bytes, where they are kept by LFS

    @property
    def blob(self) -> str:
        """Name the file of the shared cache that holds these bytes."""
        return self.sha256 or self.git_id

    @property
    def identity(self) -> str:
        """Say what the bytes are, in the words of `WeightFile.sha256`."""
        return self.sha256 or f"git:{self.git_id}"


@dataclass(frozen=True)
class Discussion:
    """A discussion of a repository, which may be a pull request."""

    number: int
    title: str
    author: str
    status: str
    is_request: bool


class DroppedError(Exception):
    """A transfer broke off: what came is good, and the rest can be asked for.

    `unreached`: no connection was made, so there is not even a status.
    """

    def __init__(
        self,
        reason: str,
        wait_seconds: float | None = None,
        *,
        status: int | None = None,
        unreached: bool = False,
    ) -> None:
        """Keep what happened, and how long the server asked to wait if it said so."""
        super().__init__(reason)
        self.reason = reason
        self.wait_seconds = wait_seconds
        self.status = status
        self.unreached = unreached
