"""Which files of a change go apart from its commit, and their bytes to where the Hub wants them.

The Hub decides, file by file: small text goes into the commit, and what git should not carry is
uploaded first, under its sha256, to a link that the Hub signs. Such an upload may be repeated,
because what is there already is what its name says. The link may lead to another server; the
token never does.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from qaudit.errors import HubError
from qaudit.hub.answers import links_in, modes_in
from qaudit.hub.change import Addition, Change
from qaudit.hub.client import Client, checked
from qaudit.hub.refusals import Asked
from qaudit.hub.wire import Sent

TAKEN = frozenset({200, 201, 204})
"""The statuses that say that something was taken."""

Came = Callable[[int, int], object]
"""Hears how many of how many files are there."""

_AT_A_TIME = 250  # files in one question
_SAMPLE_NBYTES = 512  # of each file, from which the Hub tells text from bytes
_WORKERS = 4
_LFS = "application/vnd.git-lfs+json"


def as_json(
    value: object, *, kind: str = "application/json", answers: frozenset[int] = frozenset({200})
) -> Sent:
    """Send a value."""
    return Sent("POST", json.dumps(value).encode(), {"Content-Type": kind, "Accept": kind}, answers)


def upload_apart(client: Client, change: Change, came: Came) -> frozenset[str]:
    """Upload what does not go into the commit itself; return the paths of those files."""
    apart = _apart(client, change)
    blobs = {a.sha256: a for a in change.additions if a.path in apart}
    if blobs:
        _Uploads(client, change).carry_out(tuple(blobs.values()), came)
    return apart


def _apart(client: Client, change: Change) -> frozenset[str]:
    """Ask which files are to be uploaded apart; one that would be left out is refused."""
    asked = Asked(
        f"how the files for `{checked(change.repo)}` are to be sent",
        change.repo, revision=change.branch, writes=True,
    )  # fmt: skip
    query = "" if change.onto else "?create_pr=1"
    url = f"{client.api(asked)}/preupload/{quote(change.branch, safe='')}{query}"
    modes: dict[str, tuple[str, bool]] = {}
    for some in _parts(change.additions):
        answer, _ = client.ask(asked, url, as_json({"files": [_about(a) for a in some]}))
        modes |= client.believed(asked, modes_in, answer)
    for addition in change.additions:
        mode, ignored = modes.get(addition.path, ("", False))
        if ignored:
            raise HubError(
                f"`.gitignore` of `{change.repo}` leaves out `{addition.path}`",
                hint="let it take `qaudit/`: an audit without its evidence cannot be checked",
            )
        if mode not in ("regular", "lfs"):
            raise client.wire.garbled(asked, f"it says nothing of `{addition.path}`")
    return frozenset(a.path for a in change.additions if modes[a.path][0] == "lfs" and a.data)


class _Uploads:
    """The large files of one change on their way."""

    def __init__(self, client: Client, change: Change) -> None:
        self.client, self.change = client, change
        self._links: dict[str, dict[str, Any]] = {}

    def carry_out(self, additions: Sequence[Addition], came: Came) -> None:
        """Upload several at a time; the first that cannot be uploaded ends the others."""
        for some in _parts(additions):
            self._links |= self._ask_for_links(some)
        pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="upload")
        try:
            waiting = [pool.submit(self._upload, addition) for addition in additions]
            for done, future in enumerate(waiting, 1):
                future.result()
                came(done, len(waiting))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _upload(self, addition: Addition) -> None:
        asked = Asked(f"whether it has `{addition.path}`", self.change.repo, writes=True)

        def attempt() -> None:
            # A link is good for one attempt: where it was of no use, a fresh one is asked for.
            link = self._links.pop(addition.sha256, None)
            if link is None:
                link = self._ask_for_links([addition]).get(addition.sha256, {})
            if "upload" in link:
                self._put(asked, link["upload"], addition)
            if "verify" in link:
                self._verify(asked, link["verify"], addition)

        self.client.patiently(asked, attempt)

    def _put(self, asked: Asked, link: Mapping[str, Any], addition: Addition) -> None:
        if "chunk_size" in link["header"]:
            raise self.client.wire.garbled(asked, "it wants a small file in parts")
        sent = Sent("PUT", addition.data, link["header"], TAKEN)
        self.client.wire.text(asked, self._address(asked, link), sent)

    def _verify(self, asked: Asked, link: Mapping[str, Any], addition: Addition) -> None:
        said = as_json({"oid": addition.sha256, "size": len(addition.data)}, answers=TAKEN)
        self.client.wire.text(asked, self._address(asked, link), said)

    def _address(self, asked: Asked, link: Mapping[str, Any]) -> str:
        here = f"{self.client.endpoint}/"
        return self.client.wire.address(asked, here, link["href"], elsewhere=True)

    def _ask_for_links(self, some: Sequence[Addition]) -> dict[str, dict[str, Any]]:
        """Ask where large files go; what is there already has no link."""
        change = self.change
        asked = Asked(f"where large files of `{change.repo}` go", change.repo, writes=True)
        wanted = {
            "operation": "upload",
            "transfers": ["basic"],
            "objects": [{"oid": a.sha256, "size": len(a.data)} for a in some],
            "hash_algo": "sha256",
            "ref": {"name": change.branch},
        }
        url = f"{self.client.endpoint}/{change.repo}.git/info/lfs/objects/batch"
        answer, _ = self.client.ask(asked, url, as_json(wanted, kind=_LFS))
        return self.client.believed(asked, links_in, answer)


def _about(addition: Addition) -> dict[str, object]:
    sample = base64.b64encode(addition.data[:_SAMPLE_NBYTES]).decode()
    return {"path": addition.path, "sample": sample, "size": len(addition.data)}


def _parts(additions: Sequence[Addition]) -> Iterator[Sequence[Addition]]:
    for start in range(0, len(additions), _AT_A_TIME):
        yield additions[start : start + _AT_A_TIME]
