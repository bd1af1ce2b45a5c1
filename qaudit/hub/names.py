"""What the Hub answers: revisions and files, each checked before it is used.

Names in an answer become paths on this machine and sizes become promises about its disk: a commit
is forty hexadecimal digits, a size is a whole number, a path stays below the folder it is joined
to. One bad entry refuses the whole answer, because a listing with holes would price, fetch and
identify something else than what was requested.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qaudit.types import Ref

COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST_FILE = 1 << 53  # past it JSON numbers lose their last digits elsewhere
_LONGEST_PATH, _LONGEST_NAME = 4096, 255  # bytes; what file systems take
_REPOSITORY = re.compile(r"\w([\w.-]{0,94}\w)?(/\w([\w.-]{0,94}\w)?)?", re.ASCII)


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


def git_id_of(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def revisions_in(answer: Any) -> tuple[Revision, ...]:
    table = table_in(answer, "the answer")
    branches = _revisions(table.get("branches"), "`branches`", "branch")
    revisions = (*branches, *_revisions(table.get("tags"), "`tags`", "tag"))
    _no_duplicates(f"{revision.kind} `{revision.name}`" for revision in revisions)
    return revisions


def files_in(pages: Sequence[Any]) -> tuple[HubFile, ...]:
    """Read the files in all pages of a tree; folders and links of git are none."""
    entries = [entry for page in pages for entry in tables_in(page, "a page", "an entry")]
    files = [_file(entry) for entry in entries if entry.get("type") == "file"]
    _no_duplicates(f"file `{file.path}`" for file in files)
    _no_file_is_a_folder({file.path for file in files})
    return tuple(sorted(files, key=lambda file: file.path))


def tree_entry(file: HubFile) -> dict[str, Any]:
    entry = {"type": "file", "path": file.path, "size": file.nbytes, "oid": file.git_id}
    lfs = {"oid": file.sha256, "size": file.nbytes}
    return entry if file.sha256 is None else {**entry, "lfs": lfs}


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


def shapes_in(record: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    shapes = {}
    for entry in list_in(record, "the record"):
        if len(list_in(entry, "an entry")) != 3:
            raise GarbledError("an entry is not a tensor")
        name, dtype, shape = entry
        sizes = tuple(whole_number(n, "a tensor") for n in list_in(shape, "a shape"))
        if not isinstance(name, str) or not isinstance(dtype, str) or name in shapes:
            raise GarbledError("an entry is not a tensor")
        shapes[name] = (dtype, sizes)
    return shapes


def _revisions(entries: Any, where: str, kind: Literal["branch", "tag"]) -> Iterable[Revision]:
    for table in tables_in(entries, where, "a revision"):
        name = plain_path(table.get("name"), "the name of a revision")
        commit = matching(COMMIT, table.get("targetCommit"), f"the commit of `{name}`")
        yield Revision(name, commit, kind)


def _file(entry: dict[str, Any]) -> HubFile:
    path = plain_path(entry.get("path"), "the path of a file")
    nbytes = whole_number(entry.get("size"), path)
    git_id = matching(COMMIT, entry.get("oid"), f"the git id of `{path}`")
    lfs = entry.get("lfs")
    if lfs is None:
        return HubFile(path, nbytes, git_id, None)
    table = table_in(lfs, f"`lfs` of `{path}`")
    if whole_number(table.get("size"), path) != nbytes:
        raise GarbledError(f"`{path}` has two sizes")
    return HubFile(path, nbytes, git_id, matching(SHA256, table.get("oid"), f"`{path}`"))


def _no_duplicates(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise GarbledError(f"it names {name} twice")
        seen.add(name)


def _no_file_is_a_folder(paths: set[str]) -> None:
    for path in paths:
        above = path.rpartition("/")[0]
        while above:
            if above in paths:
                raise GarbledError(f"`{above}` is both a file and a folder")
            above = above.rpartition("/")[0]


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
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise GarbledError(f"{what} is {quoted(value)}, which is no such id")
    return value


def table_in(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GarbledError(f"{what} is not a table")
    return value


def list_in(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise GarbledError(f"{what} is not a list")
    return value


def tables_in(value: Any, what: str, each: str) -> list[dict[str, Any]]:
    return [table_in(entry, each) for entry in list_in(value, what)]


def quoted(value: Any) -> str:
    """Return a foreign value for a message: escaped and short."""
    text = ascii(value)
    return f"`{text[:80]}...`" if len(text) > 80 else f"`{text}`"
