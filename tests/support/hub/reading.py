"""What the Hub tells, and to whom: repos, refs, histories, trees, and the bytes of files.

Large files come by a signed link to the CDN. The CDN is another origin, as in life: the client then
sees the Hub's own headers, and whether it takes a token along is seen here.
"""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, quote, urlencode

import yaml

from tests.support.hub.contents import Blob, Commit, Repository, blob_in_memory, pointer
from tests.support.hub.wire import Headers, Place, RefusedError, Reply, Request, as_json, refusal

if TYPE_CHECKING:
    from tests.support.hub.server import Hub


class User(NamedTuple):
    """Whoever a token belongs to."""

    name: str
    role: str


def user_of(hub: Hub, request: Request) -> User | None:
    """Return who asks; nobody without a token, and a wrong token is refused."""
    header = request.headers.get("authorization")
    if not header:
        return None
    known = hub.tokens.get(header.removeprefix("Bearer ").strip())
    if not known:
        raise refusal(401, "Invalid credentials in Authorization header")
    name, _, role = known.partition(":")
    return User(name, role or "write")


def may_read(repo: Repository, user: User | None) -> bool:
    """Say whether a user reads what is private or gated."""
    return user is not None and (user.name == repo.owner or user.name in repo.readers)


def repository_for(hub: Hub, request: Request, key: str) -> Repository:
    """Return the repo if whoever asks may know of it."""
    user = user_of(hub, request)
    repo = hub.repos.get(key)
    if repo is not None and (not repo.private or may_read(repo, user)):
        return repo
    if user is not None:
        raise refusal(404, "Repository not found", "RepoNotFound")
    # The Hub sends no code here. Its client then says RepositoryNotFoundError only if the address
    # begins with https, which ours does not.
    code = None if hub.https_style_401 else "RepoNotFound"
    raise refusal(401, "Invalid username or password.", code)


def repository_for_bytes(hub: Hub, request: Request, key: str) -> Repository:
    """Return the repo if whoever asks may read its files; of a gated one the rest is public."""
    repo, user = repository_for(hub, request, key), user_of(hub, request)
    if not repo.gated or may_read(repo, user):
        return repo
    restricted = f"Access to {repo.kind} {repo.id} is restricted"
    if user is None:
        text = " You must have access to it and be authenticated to access it. Please log in."
        raise refusal(401, f"{restricted}.{text}", "GatedRepo")
    text = f" and you are not in the authorized list. Visit {hub.url}/{repo.key} to ask for access."
    raise refusal(403, f"{restricted}{text}", "GatedRepo")


def writer_of(hub: Hub, request: Request) -> User:
    """Return who asks if the token may write."""
    user = user_of(hub, request)
    if user is None:
        raise refusal(401, "Invalid username or password.")
    if user.role == "read":
        raise refusal(403, "You don't have the required permissions to perform this action")
    return user


def commit_for(repo: Repository, revision: str) -> Commit:
    """Return the commit that a revision names."""
    commit = repo.resolve(revision)
    if commit is None:
        raise refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return commit


def timestamp(date: datetime) -> str:
    """Print a moment as the Hub does."""
    return date.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def whoami(hub: Hub, request: Request, place: Place) -> Reply:
    """Say who a token belongs to."""
    user = user_of(hub, request)
    if user is None:
        raise refusal(401, "Invalid username or password.")
    token = {"type": "access_token", "accessToken": {"displayName": "test", "role": user.role}}
    names = {"id": user.name, "name": user.name, "fullname": user.name}
    return as_json({"type": "user", **names, "orgs": [], "auth": token})


def harnesses(hub: Hub, request: Request, place: Place) -> Reply:
    """Answer a question the client asks before its first upload."""
    return as_json({"standardEnvVars": [], "harnesses": {}})


def repositories(hub: Hub, request: Request, place: Place) -> Reply:
    """List the repos of an author or with a word in their name, page by page."""
    user, query = user_of(hub, request), request.query
    author, word = query.get("author", "").lower(), query.get("search", "").lower()
    found = [
        _summary(repo)
        for repo in hub.repos.values()
        if repo.kind == place.kind
        and (not repo.private or may_read(repo, user))
        and author in ("", repo.owner.lower())
        and word in repo.id.lower()
    ]
    limit = int(query.get("limit", hub.page))
    return _page(hub, request, found, min(limit, hub.page))


def _summary(repo: Repository) -> dict[str, Any]:
    """Return what every listing says of a repo."""
    said = {"id": repo.id, "author": repo.owner, "private": repo.private, "gated": repo.gated}
    return said | ({"modelId": repo.id} if repo.kind == "model" else {})


def info(hub: Hub, request: Request, place: Place) -> Reply:
    """Describe a repo at a revision."""
    repo = repository_for(hub, request, place.repo)
    commit = commit_for(repo, place.revision)
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    return as_json(_summary(repo) | {"sha": commit.id, "siblings": siblings})


def front_matter(text: str) -> dict[str, Any]:
    """Return the metadata that a card begins with."""
    found = re.match(r"\s*---\s*\n(.*?)\n---\s*(\n|$)", text, re.S)
    if not found:
        return {}
    try:
        metadata = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(metadata, dict):
        raise ValueError("metadata must be a mapping")
    return metadata


def refs(hub: Hub, request: Request, place: Place) -> Reply:
    """List branches and tags, and pull requests if asked."""
    repo = repository_for(hub, request, place.repo)
    requests = {n: oid for n, oid in repo.branches.items() if n.startswith("refs/pr/")}
    branches = {n: oid for n, oid in repo.branches.items() if n not in requests}
    said: dict[str, Any] = {
        "branches": [_ref(name, f"refs/heads/{name}", oid) for name, oid in branches.items()],
        "tags": [_ref(name, f"refs/tags/{name}", oid) for name, oid in repo.tags.items()],
        "converts": [],
    }
    if request.query.get("include_prs"):
        said["pullRequests"] = [_ref(n.split("/")[-1], n, oid) for n, oid in requests.items()]
    return as_json(said)


def _ref(name: str, ref: str, oid: str) -> dict[str, str]:
    return {"name": name, "ref": ref, "targetCommit": oid}


def tree(hub: Hub, request: Request, place: Place) -> Reply:
    """List the files and folders below a folder."""
    repo = repository_for(hub, request, place.repo)
    commit = commit_for(repo, place.revision)
    if place.path not in commit.folders:
        text = f'{place.path} does not exist on "{place.revision}"'
        raise refusal(404, text, "EntryNotFound")
    prefix, deep = f"{place.path}/" if place.path else "", request.flag("recursive")
    entries = [
        _entry(commit, path)
        for path in sorted({*commit.files, *commit.folders} - {place.path})
        if path.startswith(prefix) and (deep or "/" not in path[len(prefix) :])
    ]
    return _page(hub, request, entries, hub.page)


def _entry(commit: Commit, path: str) -> dict[str, Any]:
    """Return what the tree says of a file or folder."""
    if path in commit.folders:
        return {"type": "directory", "oid": commit.folders[path], "size": 0, "path": path}
    blob = commit.files[path]
    said: dict[str, Any] = {"type": "file", "oid": blob.git_id, "size": blob.nbytes, "path": path}
    if blob.sha256:
        length = len(pointer(blob.sha256, blob.nbytes))
        said["lfs"] = {"oid": blob.sha256, "size": blob.nbytes, "pointerSize": length}
    return said


def paths_info(hub: Hub, request: Request, place: Place) -> Reply:
    """Describe the files and folders that are asked for; what is not there is left out."""
    repo = repository_for(hub, request, place.repo)
    commit = commit_for(repo, place.revision)
    paths = parse_qs(request.body.decode()).get("paths", [])
    known = {*commit.files, *commit.folders}
    wanted = [path.strip("/") for path in paths]
    return as_json([_entry(commit, path) for path in wanted if path in known])


def _page(hub: Hub, request: Request, entries: list[dict[str, Any]], length: int) -> Reply:
    """Return the entries behind the cursor and a link to those that follow."""
    cursor = base64.b64decode(request.query.get("cursor", ""))
    start = int(cursor or 0)
    stop = start + length
    text = base64.b64encode(str(stop).encode()).decode()
    more = _next(hub, request, "cursor", text) if stop < len(entries) else None
    return as_json(entries[start:stop], headers={"Link": more})


def _next(hub: Hub, request: Request, parameter: str, value: str) -> str:
    query = urlencode(request.query | {parameter: value})
    return f'<{hub.url}{request.path}?{query}>; rel="next"'


def resolve(hub: Hub, request: Request, place: Place) -> Reply:
    """Say where the bytes of a file are and what they must be."""
    repo, blob, head = _file_at(hub, request, place)
    head |= {"X-Linked-Size": blob.nbytes, "X-Linked-ETag": f'"{blob.etag}"'}
    commit = head["X-Repo-Commit"]
    if blob.sha256 is None:
        cache = f"/api/resolve-cache/{place.kind}s/{repo}/{commit}/{quote(place.path)}"
        return Reply(307, b"", head | {"Location": f"{cache}?etag=%22{blob.etag}%22"})
    query = urlencode({"X-Signature": hub.links.sign(), "name": place.path}, quote_via=quote)
    link = f"{hub.cdn}/cdn/{blob.sha256}?{query}"
    return Reply(302, b"", head | {"ETag": f'"{blob.etag}"', "Location": link})


def resolve_cache(hub: Hub, request: Request, place: Place) -> Reply:
    """Serve a small file."""
    _, blob, head = _file_at(hub, request, place)
    name = place.path.rpartition("/")[2]
    shown = f"inline; filename*=UTF-8''{quote(name)}"
    return _serve(
        hub, request, blob, head | {"ETag": f'"{blob.etag}"', "Content-Disposition": shown}
    )


def _file_at(
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
    return _serve(hub, request, blob, {"ETag": f'"{blob.git_id}"'})  # not the sha256: as in life


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
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "").strip())
    ranged, start, stop = found and not request.fault.get("norange"), 0, blob.nbytes
    if found and ranged:
        start, stop = int(found[1]), min(stop, int(found[2] or stop) + 1)
    if ranged and start >= blob.nbytes:
        raise RefusedError(Reply(416, b"", {"Content-Range": f"bytes */{blob.nbytes}"}))
    if ranged:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{blob.nbytes}"
    stop = min(stop, start + request.fault.get("short", stop))
    headers["Content-Length"] = stop - start
    return Reply(206 if ranged else 200, blob.read(start, stop), headers)
