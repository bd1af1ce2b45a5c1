"""What the Hub answers: revisions and files, each checked before it is used.

Names in an answer become paths on this machine and sizes become promises about its disk: a commit
is forty hexadecimal digits, a size is a whole number, a path stays below the folder it is joined
to. One bad entry refuses the whole answer, because a listing with holes would price, fetch and
identify something else than what was requested.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from qaudit.types import Ref

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_KIND = re.compile("branch|tag")
_LARGEST_FILE = 1 << 53  # past it JSON numbers lose their last digits elsewhere
_LONGEST_PATH, _LONGEST_NAME = 4096, 255  # bytes; what file systems take
_REPOSITORY = re.compile(r"\w([\w.-]{0,94}\w)?(/\w([\w.-]{0,94}\w)?)?", re.ASCII)


T = TypeVar("T")
Kind = Literal["model", "dataset"]
"""What a repository holds."""


class GarbledError(ValueError):
    """An answer is not what the Hub sends."""


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

    @classmethod
    def identified(cls, path: str, nbytes: int, identity: str) -> HubFile:
        if identity.startswith("git:"):
            return cls(path, nbytes, identity.removeprefix("git:"), None)
        return cls(path, nbytes, "", identity)

    @property
    def blob(self) -> str:
        """Return the name of the file of the shared cache that holds these bytes."""
        return self.sha256 or self.git_id

    @property
    def identity(self) -> str:
        return self.sha256 or f"git:{self.git_id}"


def is_commit(text: str) -> bool:
    return COMMIT.fullmatch(text) is not None


def revisions_in(rows: Any) -> tuple[Revision, ...]:
    """Read the name, commit and kind of each revision."""
    revisions: dict[str, Revision] = {}
    for name, commit, kind in rows_in(rows, 3):
        plain_path(name, "the name of a revision")
        matching(COMMIT, commit, f"the commit of `{name}`")
        matching(_KIND, kind, f"the kind of `{name}`")
        _add(revisions, f"{kind} `{name}`", Revision(name, commit, kind))
    return tuple(revisions.values())


def files_in(rows: Any) -> tuple[HubFile, ...]:
    """Read the path, size, git id and sha256 of each file in a tree."""
    files: dict[str, HubFile] = {}
    for path, nbytes, git_id, sha256 in rows_in(rows, 4):
        plain_path(path, "the path of a file")
        whole_number(nbytes, path)
        matching(COMMIT, git_id, f"the git id of `{path}`")
        if sha256 is not None:
            matching(SHA256, sha256, f"the sha256 of `{path}`")
        _add(files, f"file `{path}`", HubFile(path, nbytes, git_id, sha256))
    for path in [file.path for file in files.values()]:
        while path := path.rpartition("/")[0]:
            if f"file `{path}`" in files:
                raise GarbledError(f"`{path}` is both a file and a folder")
    return tuple(sorted(files.values(), key=lambda file: file.path))


def shapes_in(rows: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read the name, dtype and shape of each tensor."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, dtype, shape in rows_in(rows, 3):
        if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list):
            raise GarbledError("an entry is not a tensor")
        _add(shapes, name, (dtype, tuple(whole_number(n, "a tensor") for n in shape)))
    return shapes


def is_repository(text: str) -> bool:
    """Return whether a text is `name` or `owner/name` by the rules of the Hub."""
    plain = _REPOSITORY.fullmatch(text) is not None
    return plain and not any(part in text for part in ("--", "..")) and not text.endswith(".git")


def repository_of(target: str, *, glob: bool = False) -> Ref | None:
    """Return what `[hf://]org/name[@revision][//folder]` names; None for any other text."""
    ref = Ref.parse(target)
    owner, slash, name = ref.location.partition("/")
    name = owner + slash + (re.sub(r"[*?\[\]]", "x", name) if glob else name)
    odd = target.endswith(("@", "//")) or "@" in (ref.revision or "")
    return ref if "/" in name and is_repository(name) and not odd else None


def rows_in(value: Any, columns: int) -> list[Sequence[Any]]:
    if not isinstance(value, list):
        raise GarbledError("it is not a list")
    if any(not isinstance(row, list | tuple) or len(row) != columns for row in value):
        raise GarbledError(f"an entry of it does not have {columns} parts")
    return value


def _add(table: dict[str, T], name: str, value: T) -> None:
    if name in table:
        raise GarbledError(f"it names {name} twice")
    table[name] = value


def plain_path(value: Any, what: str) -> str:
    """Return a relative path of plain segments, which cannot leave its folder."""
    if not isinstance(value, str) or not value:
        raise GarbledError(f"{what} is missing")
    segments = value.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or "\\" in value:
        raise GarbledError(f"{what} is {quoted(value)}, which is not a plain relative path")
    if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in value):
        raise GarbledError(f"{what} is {quoted(value)}, which holds control characters")
    longest = max(len(segment.encode()) for segment in segments)
    if len(value.encode()) > _LONGEST_PATH or longest > _LONGEST_NAME:
        raise GarbledError(f"{what} is longer than a file's name may be")
    return value


def whole_number(value: Any, path: str) -> int:
    """Return a whole number that JSON holds exactly."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST_FILE:
        raise GarbledError(f"the size of `{path}` is {quoted(value)}")
    return value


def matching(pattern: re.Pattern[str], value: Any, what: str) -> str:
    """Return a text that a pattern matches."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise GarbledError(f"{what} is {quoted(value)}, which is no such id")
    return value


def quoted(value: Any) -> str:
    """Return a foreign value for a message: escaped and short."""
    text = ascii(value)
    return f"`{text[:80]}...`" if len(text) > 80 else f"`{text}`"
