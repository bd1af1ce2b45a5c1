"""The bytes of files: small ones from the Hub itself, large ones by a signed link to the CDN.

The CDN is another origin, as in life: the client then sees the Hub's own headers, and whether it
takes a token along is seen here.
"""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from tests.support.hub.access import commit_for, repository_for_bytes
from tests.support.hub.contents import Blob, blob_in_memory
from tests.support.hub.exchange import Headers, Place, RefusedError, Reply, Request, refusal

if TYPE_CHECKING:
    from tests.support.hub.server import Hub


def resolve(hub: Hub, request: Request, place: Place) -> Reply:
    """Say where the bytes of a file are and what they must be."""
    repo, blob, head = _find(hub, request, place)
    head |= {"X-Linked-Size": blob.nbytes, "X-Linked-ETag": f'"{blob.etag}"'}
    commit = head["X-Repo-Commit"]
    if blob.sha256 is None:
        cache = f"/api/resolve-cache/{place.kind}s/{repo}/{commit}/{quote(place.path)}"
        return Reply(307, b"", head | {"Location": f"{cache}?etag=%22{blob.etag}%22"})
    if hub.repos[place.repo].xet:
        auth = f"{hub.url}/api/{place.kind}s/{repo}/xet-read-token/{commit}"
        head |= {"X-Xet-Hash": blob.xet_hash, "Link": f'<{auth}>; rel="xet-auth"'}
    query = urlencode({"X-Signature": hub.links.sign(), "name": place.path}, quote_via=quote)
    link = f"{hub.cdn}/cdn/{blob.sha256}?{query}"
    return Reply(302, b"", head | {"ETag": f'"{blob.etag}"', "Location": link})


def resolve_cache(hub: Hub, request: Request, place: Place) -> Reply:
    """Serve a small file."""
    _, blob, head = _find(hub, request, place)
    name = place.path.rpartition("/")[2]
    shown = f"inline; filename*=UTF-8''{quote(name)}"
    return _serve(
        hub, request, blob, head | {"ETag": f'"{blob.etag}"', "Content-Disposition": shown}
    )


def _find(
    hub: Hub, request: Request, place: Place
) -> tuple[str, Blob, dict[str, str | int | None]]:
    """Return the repo's id, the file, and the headers of either answer."""
    repo = repository_for_bytes(hub, request, place.repo)
    commit = commit_for(repo, place.revision)
    head: dict[str, str | int | None] = {"X-Repo-Commit": commit.id, "Accept-Ranges": "bytes"}
    if place.path not in commit.files:
        named = {"X-Error-Message": "Entry not found", "X-Error-Code": "EntryNotFound"}
        raise RefusedError(Reply(404, b"Entry not found", head | named))
    return repo.id, commit.files[place.path], head


class Links:
    """Signed links to the CDN: each answer has its own, and one that has expired stays so."""

    def __init__(self) -> None:
        self._count = 0
        self._expired: set[str] = set()

    def sign(self) -> str:
        """Return a signature that was never given before."""
        self._count += 1
        return f"{self._count:06d}"

    def check(self, request: Request) -> None:
        """Refuse a link that has expired, as a CDN would: XML, none of the Hub's headers."""
        signature = request.query.get("X-Signature", "")
        if request.fault.get("expired"):
            self._expired.add(signature)
        if not signature or signature in self._expired or int(signature) > self._count:
            text = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
            raise RefusedError(Reply(403, text, {"Content-Type": "application/xml"}))


def download(hub: Hub, request: Request, place: Place) -> Reply:
    """Serve a large file to whoever has a link."""
    hub.links.check(request)
    blob = next((r.large[place.path] for r in hub.repos.values() if place.path in r.large), None)
    if blob is None:
        raise RefusedError(Reply(404, b"NoSuchKey"))
    return _serve(hub, request, blob, {"ETag": f'"{blob.xet_hash}"'})  # not the sha256: as in life


def verify(hub: Hub, request: Request, place: Place) -> Reply:
    """Take what is said of an upload, which the client sends with its token."""
    return Reply(200, b"{}")


def upload(hub: Hub, request: Request, place: Place) -> Reply:
    """Take a large file that a commit will name."""
    blob = blob_in_memory("upload.bin", request.body)
    if blob.sha256 != place.path:
        raise refusal(400, "sha256 mismatch")
    for repo in hub.repos.values():
        repo.large.setdefault(place.path, blob)
    return Reply(200, b"", {"ETag": '"uploaded"'})


def _serve(hub: Hub, request: Request, blob: Blob, headers: Headers) -> Reply:
    """Return a file or the range of it that is asked for."""
    kind = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
    headers = {**kind, **headers}
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", "").strip())
    ranged = found and any(found.groups()) and not request.fault.get("norange")
    if not ranged and _wants_gzip(hub, request, blob):
        return Reply(
            200, iter([gzip.compress(blob.whole())]), headers | {"Content-Encoding": "gzip"}
        )
    start, stop = _span(found, blob.nbytes) if found and ranged else (0, blob.nbytes)
    if ranged and start >= blob.nbytes:
        raise RefusedError(Reply(416, b"", {"Content-Range": f"bytes */{blob.nbytes}"}))
    if ranged:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{blob.nbytes}"
    stop = min(stop, start + request.fault.get("short", stop))
    headers["Content-Length"] = stop - start
    return Reply(206 if ranged else 200, blob.read(start, stop), headers)


def _span(found: re.Match[str], nbytes: int) -> tuple[int, int]:
    first, last = found.groups()
    if not first:
        return max(0, nbytes - int(last)), nbytes
    return int(first), min(nbytes, int(last) + 1) if last else nbytes


def _wants_gzip(hub: Hub, request: Request, blob: Blob) -> bool:
    accepts = "gzip" in request.headers.get("accept-encoding", "")
    return hub.gzip_text and accepts and blob.sha256 is None and request.method == "GET"
