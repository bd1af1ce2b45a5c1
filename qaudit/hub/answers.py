"""What the Hub answers: revisions, files, pull requests; each checked before it is used.

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

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DISCUSSION = re.compile(r"\S+/discussions/[1-9]\d{0,8}")
_IN_A_HEADER = re.compile(r"[\x20-\x7e]*")
_REPOSITORY = re.compile(r"\w([\w.-]{0,94}\w)?(/\w([\w.-]{0,94}\w)?)?", re.ASCII)
_LARGEST_FILE = 1 << 53  # past it JSON numbers lose their last digits elsewhere
_LONGEST_PATH, _LONGEST_NAME = 4096, 255  # bytes; what file systems take


Kind = Literal["model", "dataset"]
"""What a repository holds."""


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
        """Return a file by its identity alone."""
        if identity.startswith("git:"):
            return cls(path, nbytes, identity.removeprefix("git:"), None)
        return cls(path, nbytes, "", identity)

    @property
    def blob(self) -> str:
        """Return the name of the file of the shared cache that holds these bytes."""
        return self.sha256 or self.git_id

    @property
    def identity(self) -> str:
        """Return the hash in the form of `WeightFile.sha256`."""
        return self.sha256 or f"git:{self.git_id}"


@dataclass(frozen=True)
class Discussion:
    """A discussion of a repository, which may be a pull request."""

    number: int
    title: str
    author: str
    status: str
    is_request: bool


class GarbledError(ValueError):
    """An answer is not what the Hub sends."""


def is_commit(text: str) -> bool:
    """Return whether a text is a full commit id."""
    return _COMMIT.fullmatch(text) is not None


def git_id_of(data: bytes) -> str:
    """Return the id that git gives to these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def revisions_in(answer: Any) -> tuple[Revision, ...]:
    """Read the branches and tags of a repository, in their order."""
    table = _table(answer, "the answer")
    branches = _revisions(table.get("branches"), "`branches`", "branch")
    revisions = (*branches, *_revisions(table.get("tags"), "`tags`", "tag"))
    _no_duplicates(f"{revision.kind} `{revision.name}`" for revision in revisions)
    return revisions


def commit_in(answer: Any) -> str:
    """Read the commit that a repository's description is about."""
    return _matching(_COMMIT, _table(answer, "the answer").get("sha"), "the commit")


def files_in(pages: Sequence[Any]) -> tuple[HubFile, ...]:
    """Read the files in all pages of a tree; folders and links of git are none."""
    entries = [entry for page in pages for entry in _tables(page, "a page", "an entry")]
    files = [_file(entry) for entry in entries if entry.get("type") == "file"]
    _no_duplicates(f"file `{file.path}`" for file in files)
    _no_file_is_a_folder({file.path for file in files})
    return tuple(sorted(files, key=lambda file: file.path))


def tree_entry(file: HubFile) -> dict[str, Any]:
    """Return a file in the form of the Hub's tree, so that `files_in` reads it again."""
    entry = {"type": "file", "path": file.path, "size": file.nbytes, "oid": file.git_id}
    lfs = {"oid": file.sha256, "size": file.nbytes}
    return entry if file.sha256 is None else {**entry, "lfs": lfs}


def repositories_in(pages: Sequence[Any]) -> tuple[str, ...]:
    """Read the names of repositories; one that no client could request is left out."""
    entries = [entry for page in pages for entry in _tables(page, "a page", "an entry")]
    names = [entry.get("id") for entry in entries]
    return tuple(name for name in names if isinstance(name, str) and is_repository(name))


def is_repository(text: str) -> bool:
    """Return whether a text is `name` or `owner/name` by the rules of the Hub."""
    plain = _REPOSITORY.fullmatch(text) is not None
    return plain and not any(part in text for part in ("--", "..")) and not text.endswith(".git")


def shapes_in(record: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read tensors, their dtypes and shapes, as they were written to this machine's disk."""
    shapes = {}
    for entry in _list(record, "the record"):
        if len(_list(entry, "an entry")) != 3:
            raise GarbledError("an entry is not a tensor")
        name, dtype, shape = entry
        sizes = tuple(_nbytes(n, "a tensor") for n in _list(shape, "a shape"))
        if not isinstance(name, str) or not isinstance(dtype, str) or name in shapes:
            raise GarbledError("an entry is not a tensor")
        shapes[name] = (dtype, sizes)
    return shapes


# --------------------------------------------------------------------------------- pull requests


def account_in(answer: Any) -> str:
    """Read the name of the account that a token belongs to."""
    return _text(_table(answer, "the answer").get("name"), "the name of the account")


def discussions_in(answer: Any) -> tuple[tuple[Discussion, ...], int]:
    """Read one page of discussions and pull requests, and how many there are in all."""
    table = _table(answer, "the answer")
    rows = _tables(table.get("discussions"), "the page", "a discussion")
    return tuple(map(_discussion, rows)), _nbytes(table.get("count"), "the list of discussions")


def complaints_in(answer: Any) -> tuple[str, ...]:
    """Read what is wrong with the metadata of a README, if anything is."""
    errors = _table(answer, "the answer").get("errors", [])
    rows = _tables(errors, "the complaints", "a complaint")
    return tuple(_text(row.get("message"), "a complaint") for row in rows)


def modes_in(answer: Any) -> dict[str, tuple[str, bool]]:
    """Read how each file is to be sent, and whether the repository leaves it out."""
    files = _table(answer, "the answer").get("files")
    return {
        _path(table.get("path"), "the path of a file"): (
            _text(table.get("uploadMode"), "how a file is to be sent"),
            table.get("shouldIgnore") is True,
        )
        for table in _tables(files, "the list of files", "a file")
    }


def links_in(answer: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """Read where the bytes of large files go, by their sha256: `upload` and then `verify`."""
    objects = _table(answer, "the answer").get("objects")
    links: dict[str, dict[str, dict[str, Any]]] = {}
    for table in _tables(objects, "the list of files", "a file"):
        if "error" in table:
            message = _table(table["error"], "an error").get("message")
            raise GarbledError(f"it refuses a file: {_quoted(message)}")
        actions = _table(table.get("actions") or {}, "what is to be done")
        oid = _matching(_SHA256, table.get("oid"), "the hash of a file")
        links[oid] = {
            name: _link(actions[name]) for name in ("upload", "verify") if name in actions
        }
    return links


def number_in(answer: Any) -> int:
    """Read the number of the pull request that a commit opened."""
    url = _text(_table(answer, "the answer").get("pullRequestUrl"), "the pull request")
    return int(_matching(_DISCUSSION, url, "the address of the pull request").rpartition("/")[2])


def _discussion(table: dict[str, Any]) -> Discussion:
    author = table.get("author")  # none where the account is gone
    return Discussion(
        number=_nbytes(table.get("num"), "the number of a discussion"),
        title=_text(table.get("title"), "the title of a discussion"),
        author=_text(author.get("name", ""), "an author") if isinstance(author, dict) else "",
        status=_text(table.get("status"), "the state of a discussion"),
        is_request=table.get("isPullRequest") is True,
    )


def _link(value: Any) -> dict[str, Any]:
    table = _table(value, "a link")
    headers = _table(table.get("header") or {}, "the headers of a link")
    if not all(_IN_A_HEADER.fullmatch(f"{k}{v}") for k, v in headers.items()):
        raise GarbledError("the headers of a link hold what no header can")
    return {
        "href": _text(table.get("href"), "a link"),
        "header": {name: str(value) for name, value in headers.items()},
    }


# -------------------------------------------------------------------------------------- entries


def _revisions(entries: Any, where: str, kind: Literal["branch", "tag"]) -> Iterable[Revision]:
    for table in _tables(entries, where, "a revision"):
        name = _path(table.get("name"), "the name of a revision")
        commit = _matching(_COMMIT, table.get("targetCommit"), f"the commit of `{name}`")
        yield Revision(name, commit, kind)


def _file(entry: dict[str, Any]) -> HubFile:
    path = _path(entry.get("path"), "the path of a file")
    nbytes = _nbytes(entry.get("size"), path)
    git_id = _matching(_COMMIT, entry.get("oid"), f"the git id of `{path}`")
    lfs = entry.get("lfs")
    if lfs is None:
        return HubFile(path, nbytes, git_id, None)
    table = _table(lfs, f"`lfs` of `{path}`")
    if _nbytes(table.get("size"), path) != nbytes:
        raise GarbledError(f"`{path}` has two sizes")
    return HubFile(path, nbytes, git_id, _matching(_SHA256, table.get("oid"), f"`{path}`"))


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


# --------------------------------------------------------------------------------------- values


def _path(value: Any, what: str) -> str:
    """Return a relative path of plain segments, which cannot leave its folder."""
    if not isinstance(value, str) or not value:
        raise GarbledError(f"{what} is missing")
    segments = value.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or "\\" in value:
        raise GarbledError(f"{what} is {_quoted(value)}, which is not a plain relative path")
    if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in value):
        raise GarbledError(f"{what} is {_quoted(value)}, which holds control characters")
    longest = max(len(segment.encode()) for segment in segments)
    if len(value.encode()) > _LONGEST_PATH or longest > _LONGEST_NAME:
        raise GarbledError(f"{what} is longer than a file's name may be")
    return value


def _nbytes(value: Any, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST_FILE:
        raise GarbledError(f"the size of `{path}` is {_quoted(value)}")
    return value


def _matching(pattern: re.Pattern[str], value: Any, what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise GarbledError(f"{what} is {_quoted(value)}, which is no such id")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise GarbledError(f"{what} is {_quoted(value)}, which is no text")
    return value


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GarbledError(f"{what} is not a table")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise GarbledError(f"{what} is not a list")
    return value


def _tables(value: Any, what: str, each: str) -> list[dict[str, Any]]:
    return [_table(entry, each) for entry in _list(value, what)]


def _quoted(value: Any) -> str:
    """Return a foreign value for a message: escaped and short."""
    text = ascii(value)
    return f"`{text[:80]}...`" if len(text) > 80 else f"`{text}`"
