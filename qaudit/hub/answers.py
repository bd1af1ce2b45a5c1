"""JSON of the Hub -> values, or a sentence that says why it cannot be believed.

Names in an answer become paths on this machine and sizes become promises about its disk, so
nothing is taken as it comes: a commit is forty hexadecimal digits, a size is a whole number,
a path stays below the folder it is joined to. One bad entry condemns the whole answer. A
listing with holes in it would price, fetch and identify something else than what was requested.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from qaudit.hub.entries import Discussion, HubFile, Revision

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DISCUSSION = re.compile(r"\S+/discussions/[1-9]\d{0,8}")
_IN_A_HEADER = re.compile(r"[\x20-\x7e]*")
_REPOSITORY = re.compile(r"\w([\w.-]{0,94}\w)?(/\w([\w.-]{0,94}\w)?)?", re.ASCII)
_LARGEST_FILE = 1 << 53  # past it JSON numbers lose their last digits elsewhere
_LONGEST_PATH, _LONGEST_NAME = 4096, 255  # bytes; what file systems take


class GarbledError(ValueError):
    """An answer is not what the Hub sends."""


def is_commit(text: str) -> bool:
    """Say whether a text is a full commit id."""
    return _COMMIT.fullmatch(text) is not None


def revisions_in(answer: Any) -> tuple[Revision, ...]:
    """Read the branches and tags of a repository, in the order in which they are told."""
    table = _table(answer, "the answer")
    found = [
        revision
        for key, kind in (("branches", "branch"), ("tags", "tag"))
        for revision in _named(table.get(key), key, kind)  # type: ignore[arg-type]
    ]
    _no_duplicates(f"{revision.kind} `{revision.name}`" for revision in found)
    return tuple(found)


def commit_in(answer: Any) -> str:
    """Read the commit that a repository's description is about."""
    return _matching(_COMMIT, _table(answer, "the answer").get("sha"), "the commit")


def files_in(pages: Sequence[Any]) -> tuple[HubFile, ...]:
    """Read all pages of a tree; folders are not told, and links of git are not files."""
    entries = [entry for page in pages for entry in _list(page, "a page")]
    found = [_file(e) for e in entries if _table(e, "an entry").get("type") == "file"]
    _no_duplicates(f"file `{file.path}`" for file in found)
    _no_file_is_a_folder(file.path for file in found)
    return tuple(sorted(found, key=lambda file: file.path))


def repositories_in(pages: Sequence[Any]) -> tuple[str, ...]:
    """Read the names of repositories; one that no client could ask for is left out."""
    entries = [_table(entry, "an entry") for page in pages for entry in _list(page, "a page")]
    names = [entry.get("id") for entry in entries]
    return tuple(name for name in names if isinstance(name, str) and is_repository(name))


def is_repository(text: str) -> bool:
    """Say whether a text is `name` or `owner/name` by the rules of the Hub."""
    plain = _REPOSITORY.fullmatch(text) is not None
    return plain and not any(part in text for part in ("--", "..")) and not text.endswith(".git")


def shapes_in(kept: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read tensors, their dtypes and shapes, as they were written to this machine's disk."""
    found = {}
    for entry in _list(kept, "the record"):
        if len(_list(entry, "an entry")) != 3:
            raise GarbledError("an entry is not a tensor")
        name, dtype, shape = entry
        sizes = tuple(_nbytes(n, "a tensor") for n in _list(shape, "a shape"))
        if not isinstance(name, str) or not isinstance(dtype, str) or name in found:
            raise GarbledError("an entry is not a tensor")
        found[name] = (dtype, sizes)
    return found


# --------------------------------------------------------------------------------- pull requests


def account_in(answer: Any) -> str:
    """Read the name of the account that a token belongs to."""
    return _text(_table(answer, "the answer").get("name"), "the name of the account")


def discussions_in(answer: Any) -> tuple[tuple[Discussion, ...], int]:
    """Read one page of discussions and pull requests, and how many there are in all."""
    table = _table(answer, "the answer")
    rows = [_table(row, "a discussion") for row in _list(table.get("discussions"), "the page")]
    return tuple(map(_discussion, rows)), _nbytes(table.get("count"), "the list of discussions")


def complaints_in(answer: Any) -> tuple[str, ...]:
    """Read what is wrong with the metadata of a README, if anything is."""
    rows = _list(_table(answer, "the answer").get("errors", []), "the complaints")
    return tuple(_text(_table(row, "a complaint").get("message"), "a complaint") for row in rows)


def modes_in(answer: Any) -> dict[str, tuple[str, bool]]:
    """Read how each file is to be sent, and whether the repository leaves it out."""
    rows = _list(_table(answer, "the answer").get("files"), "the list of files")
    tables = [_table(row, "a file") for row in rows]
    return {
        _path(table.get("path"), "the path of a file"): (
            _text(table.get("uploadMode"), "how a file is to be sent"),
            table.get("shouldIgnore") is True,
        )
        for table in tables
    }


def links_in(answer: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """Read where the bytes of large files go, by their sha256: `upload` and then `verify`."""
    rows = _list(_table(answer, "the answer").get("objects"), "the list of files")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for table in (_table(row, "a file") for row in rows):
        if "error" in table:
            said = _table(table["error"], "an error").get("message")
            raise GarbledError(f"it refuses a file: {_quoted(said)}")
        actions = _table(table.get("actions") or {}, "what is to be done")
        oid = _matching(_SHA256, table.get("oid"), "the hash of a file")
        found[oid] = {
            name: _link(actions[name]) for name in ("upload", "verify") if name in actions
        }
    return found


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


def _named(entries: Any, where: str, kind: Literal["branch", "tag"]) -> Iterable[Revision]:
    for entry in _list(entries, f"`{where}`"):
        table = _table(entry, "a revision")
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


def _no_file_is_a_folder(paths: Iterable[str]) -> None:
    paths = set(paths)
    for path in paths:
        above = path.rpartition("/")[0]
        while above:
            if above in paths:
                raise GarbledError(f"`{above}` is both a file and a folder")
            above = above.rpartition("/")[0]


# --------------------------------------------------------------------------------------- values


def _path(value: Any, what: str) -> str:
    """Return a relative path of plain segments; whatever could leave a folder is refused."""
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


def _quoted(value: Any) -> str:
    """Return a foreign value for a message: escaped and short."""
    text = ascii(value)
    return f"`{text[:80]}...`" if len(text) > 80 else f"`{text}`"
