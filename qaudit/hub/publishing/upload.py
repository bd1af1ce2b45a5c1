"""The files of a commit to the Hub; those that git should not carry are uploaded apart from it.

The Hub decides, file by file: small text goes into the commit, and other files are uploaded first,
under their sha256, to a link that the Hub signs. Such an upload may be repeated, because what is
there already is what its name says. The link may lead to another server; the token never does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from qaudit.errors import HubError
from qaudit.hub.answers import (
    SHA256,
    GarbledError,
    HubFile,
    git_id_of,
    matching,
    plain_path,
    quoted,
    table_in,
    tables_in,
    text_in,
)
from qaudit.hub.client import Client, checked
from qaudit.hub.failures import Request
from qaudit.hub.wire import Payload

SUCCESS = frozenset({200, 201, 204})
"""The statuses of a successful upload or commit."""

UploadProgress = Callable[[int, int], object]
"""Called with how many of how many files are there."""

_AT_A_TIME = 250  # files in one request
_SAMPLE_NBYTES = 512  # of each file, from which the Hub tells text from bytes
_WORKERS = 4
_LARGE_NBYTES = 2**26
_IN_A_HEADER = re.compile(r"[\x20-\x7e]*")
_LFS = "application/vnd.git-lfs+json"


@dataclass(frozen=True)
class Addition:
    """A file that a commit adds or replaces."""

    path: str
    content: bytes | Path = field(repr=False)  # in memory, or a file that is read when it is sent

    @property
    def data(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()

    @property
    def nbytes(self) -> int:
        if isinstance(self.content, bytes):
            return len(self.content)
        return self.content.stat().st_size

    @property
    def first(self) -> bytes:
        """Return the first bytes, which tell text from binary data."""
        if isinstance(self.content, bytes):
            return self.content[:_SAMPLE_NBYTES]
        with self.content.open("rb") as file:
            return file.read(_SAMPLE_NBYTES)

    @cached_property
    def sha256(self) -> str:
        if isinstance(self.content, bytes):
            return hashlib.sha256(self.content).hexdigest()
        with self.content.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def is_in(self, listed: Mapping[str, HubFile]) -> bool:
        """Return whether a tree holds these very bytes at this path."""
        file = listed.get(self.path)
        if file is None:
            return False
        return file.blob == (git_id_of(self.data) if file.sha256 is None else self.sha256)


@dataclass(frozen=True)
class PullRequest:
    """A pull request of a repository."""

    number: int
    title: str
    url: str

    @property
    def revision(self) -> str:
        return f"refs/pr/{self.number}"


@dataclass(frozen=True)
class Change:
    """One commit: its parent, its message, and what it adds and removes."""

    repo: str
    parent: str  # a full commit
    title: str
    description: str
    additions: tuple[Addition, ...]
    removed: tuple[str, ...] = ()
    onto: PullRequest | None = None  # None: opens one

    @property
    def branch(self) -> str:
        return self.onto.revision if self.onto else "main"

    def url(self, client: Client, request: Request, action: str) -> str:
        """Return the API's address for an action on the branch that is committed to."""
        query = "" if self.onto else "?create_pr=1"
        return f"{client.api(request)}/{action}/{quote(self.branch, safe='')}{query}"


def as_json(
    value: object, *, kind: str = "application/json", statuses: frozenset[int] = frozenset({200})
) -> Payload:
    headers = {"Content-Type": kind, "Accept": kind}
    return Payload("POST", json.dumps(value).encode(), headers, statuses)


def upload_files(client: Client, change: Change, progress: UploadProgress) -> frozenset[str]:
    """Upload the files that do not go into the commit itself; return their paths."""
    apart = _files_apart(client, change)
    blobs = {a.sha256: a for a in change.additions if a.path in apart}
    if blobs:
        _Uploads(client, change).run(tuple(blobs.values()), progress)
    return apart


def _files_apart(client: Client, change: Change) -> frozenset[str]:
    """Return the files to upload apart; one that the Hub would leave out is refused."""
    request = Request(
        f"how the files for `{checked(change.repo)}` are to be sent",
        change.repo,
        revision=change.branch,
        writes=True,
    )
    url = change.url(client, request, "preupload")
    modes: dict[str, tuple[str, bool]] = {}
    for some in _batches(change.additions):
        answer, _ = client.ask(request, url, as_json({"files": [_sample(a) for a in some]}))
        modes |= client.parsed(request, modes_in, answer)
    for addition in change.additions:
        mode, is_ignored = modes.get(addition.path, ("", False))
        if is_ignored:
            raise HubError(
                f"`.gitignore` of `{change.repo}` leaves out `{addition.path}`",
                hint="let it take `qaudit/`: an audit without its evidence cannot be checked",
            )
        if mode not in ("regular", "lfs"):
            raise client.wire.garbled(request, f"it says nothing of `{addition.path}`")
    return frozenset(a.path for a in change.additions if modes[a.path][0] == "lfs" and a.nbytes)


class _Uploads:
    def __init__(self, client: Client, change: Change) -> None:
        self.client, self.change = client, change
        self._links: dict[str, dict[str, Any]] = {}

    def run(self, additions: Sequence[Addition], progress: UploadProgress) -> None:
        """Upload several at a time; the first that fails ends the others."""
        for some in _batches(additions):
            self._links |= self._new_links(some)
        large = (
            max(addition.nbytes for addition in additions) > _LARGE_NBYTES
        )  # one at a time in memory
        pool = ThreadPoolExecutor(1 if large else _WORKERS, thread_name_prefix="upload")
        try:
            futures = [pool.submit(self._upload, addition) for addition in additions]
            for done, future in enumerate(futures, 1):
                future.result()
                progress(done, len(futures))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _upload(self, addition: Addition) -> None:
        request = Request(f"whether it has `{addition.path}`", self.change.repo, writes=True)

        def attempt() -> None:
            # A link is good for one attempt; after a failed one a fresh link is requested.
            link = self._links.pop(addition.sha256, None)
            if link is None:
                link = self._new_links([addition]).get(addition.sha256, {})
            if "upload" in link:
                if "chunk_size" in link["upload"]["header"]:
                    raise self.client.wire.garbled(request, "it wants a small file in parts")
                self._send(
                    request,
                    link["upload"],
                    Payload("PUT", addition.data, link["upload"]["header"], SUCCESS),
                )
            if "verify" in link:
                about = {"oid": addition.sha256, "size": addition.nbytes}
                self._send(request, link["verify"], as_json(about, statuses=SUCCESS))

        self.client.with_retries(request, attempt)

    def _send(self, request: Request, link: Mapping[str, Any], payload: Payload) -> None:
        here = f"{self.client.endpoint}/"
        url = self.client.wire.address(request, here, link["href"], elsewhere=True)
        self.client.wire.text(request, url, payload)

    def _new_links(self, some: Sequence[Addition]) -> dict[str, dict[str, Any]]:
        """Return where large files go; what is there already has no link."""
        change = self.change
        request = Request(f"where large files of `{change.repo}` go", change.repo, writes=True)
        batch = {
            "operation": "upload",
            "transfers": ["basic"],
            "objects": [{"oid": a.sha256, "size": a.nbytes} for a in some],
            "hash_algo": "sha256",
            "ref": {"name": change.branch},
        }
        url = f"{self.client.endpoint}/{change.repo}.git/info/lfs/objects/batch"
        answer, _ = self.client.ask(request, url, as_json(batch, kind=_LFS))
        return self.client.parsed(request, links_in, answer)


def _sample(addition: Addition) -> dict[str, object]:
    sample = base64.b64encode(addition.first).decode()
    return {"path": addition.path, "sample": sample, "size": addition.nbytes}


def _batches(additions: Sequence[Addition]) -> Iterator[Sequence[Addition]]:
    for start in range(0, len(additions), _AT_A_TIME):
        yield additions[start : start + _AT_A_TIME]


def modes_in(answer: Any) -> dict[str, tuple[str, bool]]:
    """Read how each file is to be sent, and whether the repository leaves it out."""
    files = table_in(answer, "the answer").get("files")
    return {
        plain_path(table.get("path"), "the path of a file"): (
            text_in(table.get("uploadMode"), "how a file is to be sent"),
            table.get("shouldIgnore") is True,
        )
        for table in tables_in(files, "the list of files", "a file")
    }


def links_in(answer: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """Read where the bytes of large files go, by their sha256: `upload` and then `verify`."""
    objects = table_in(answer, "the answer").get("objects")
    links: dict[str, dict[str, dict[str, Any]]] = {}
    for table in tables_in(objects, "the list of files", "a file"):
        if "error" in table:
            message = table_in(table["error"], "an error").get("message")
            raise GarbledError(f"it refuses a file: {quoted(message)}")
        actions = table_in(table.get("actions") or {}, "what is to be done")
        oid = matching(SHA256, table.get("oid"), "the hash of a file")
        links[oid] = {
            name: _link(actions[name]) for name in ("upload", "verify") if name in actions
        }
    return links


def _link(value: Any) -> dict[str, Any]:
    table = table_in(value, "a link")
    headers = table_in(table.get("header") or {}, "the headers of a link")
    if not all(_IN_A_HEADER.fullmatch(f"{k}{v}") for k, v in headers.items()):
        raise GarbledError("the headers of a link hold what no header can")
    return {
        "href": text_in(table.get("href"), "a link"),
        "header": {name: str(value) for name, value in headers.items()},
    }
