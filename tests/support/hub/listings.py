"""What the Hub tells about repos: which there are, their refs, histories and trees."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode

import yaml

from tests.support.hub.access import (
    commit_for,
    may_read,
    repository_for,
    repository_for_bytes,
    user_of,
)
from tests.support.hub.contents import Blob, Commit, Repository, pointer
from tests.support.hub.exchange import Place, Reply, Request, as_json, refusal

if TYPE_CHECKING:
    from tests.support.hub.server import Hub


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


def allowed(hub: Hub, request: Request, place: Place) -> Reply:
    """Say that files may be read, or refuse."""
    repository_for_bytes(hub, request, place.repo)
    return as_json({})


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
    said = {
        "_id": hashlib.md5(repo.key.encode()).hexdigest()[:24],
        "id": repo.id,
        "author": repo.owner,
        "private": repo.private,
        "gated": repo.gated,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "createdAt": timestamp(next(iter(repo.commits.values())).date),
    }
    return said | ({"modelId": repo.id} if repo.kind == "model" else {})


def info(hub: Hub, request: Request, place: Place) -> Reply:
    """Describe a repo at a revision."""
    repo = repository_for(hub, request, place.repo)
    commit = commit_for(repo, place.revision)
    siblings = [
        _sibling(path, blob, full=request.flag("blobs"))
        for path, blob in sorted(commit.files.items())
    ]
    said = _summary(repo) | {
        "sha": commit.id,
        "lastModified": timestamp(commit.date),
        "siblings": siblings,
        "usedStorage": sum(blob.nbytes for blob in repo.large.values()),
    }
    return as_json(said | _cards(commit))


def _sibling(path: str, blob: Blob, *, full: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"rfilename": path}
    if full:
        said |= {"blobId": blob.git_id, "size": blob.nbytes}
    if full and blob.sha256:
        length = len(pointer(blob.sha256, blob.nbytes))
        said["lfs"] = {"sha256": blob.sha256, "size": blob.nbytes, "pointerSize": length}
    return said


def _cards(commit: Commit) -> dict[str, Any]:
    """Return what the Hub reads from the config and the card; a broken one is passed over."""
    said: dict[str, Any] = {}
    for path, key, read in (
        ("config.json", "config", _config),
        ("README.md", "cardData", front_matter),
    ):
        if path in commit.files:
            try:
                said[key] = read(commit.files[path].whole().decode())
            except ValueError:
                continue
    if "model-index" in said.get("cardData", {}):
        said["model-index"] = said["cardData"]["model-index"]
    return said


def _config(text: str) -> dict[str, Any]:
    config = json.loads(text)
    return {key: config[key] for key in ("architectures", "model_type") if key in config}


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


def commits(hub: Hub, request: Request, place: Place) -> Reply:
    """List a history, newest first; of a gated repo it is closed, as on the real Hub."""
    repo = repository_for_bytes(hub, request, place.repo)
    history = [
        {
            "id": commit.id,
            "title": commit.title,
            "message": commit.message,
            "authors": [{"user": commit.author, "avatar": ""}],
            "date": timestamp(commit.date),
        }
        for commit in repo.history(commit_for(repo, place.revision))
    ]
    page = int(request.query.get("p", 0))
    start, stop = page * hub.page, (page + 1) * hub.page
    more = _next(hub, request, "p", str(page + 1)) if stop < len(history) else None
    return as_json(history[start:stop], headers={"X-Total-Count": len(history), "Link": more})


def tree(hub: Hub, request: Request, place: Place) -> Reply:
    """List the files and folders below a folder."""
    repo = repository_for(hub, request, place.repo)
    commit = commit_for(repo, place.revision)
    if place.path not in commit.folders:
        text = f'{place.path} does not exist on "{place.revision}"'
        raise refusal(404, text, "EntryNotFound")
    prefix, deep = f"{place.path}/" if place.path else "", request.flag("recursive")
    last = {"id": commit.id, "title": commit.title, "date": timestamp(commit.date)}
    more = {"lastCommit": last} if request.flag("expand") else {}
    entries = [
        _entry(repo, commit, path) | more
        for path in sorted({*commit.files, *commit.folders} - {place.path})
        if path.startswith(prefix) and (deep or "/" not in path[len(prefix) :])
    ]
    return _page(hub, request, entries, hub.page)


def _entry(repo: Repository, commit: Commit, path: str) -> dict[str, Any]:
    """Return what the tree says of a file or folder."""
    if path in commit.folders:
        return {"type": "directory", "oid": commit.folders[path], "size": 0, "path": path}
    blob = commit.files[path]
    said: dict[str, Any] = {"type": "file", "oid": blob.git_id, "size": blob.nbytes, "path": path}
    if blob.sha256:
        length = len(pointer(blob.sha256, blob.nbytes))
        said["lfs"] = {"oid": blob.sha256, "size": blob.nbytes, "pointerSize": length}
        said |= {"xetHash": blob.xet_hash} if repo.xet else {}
    return said


def paths_info(hub: Hub, request: Request, place: Place) -> Reply:
    """Describe the files and folders that are asked for; what is not there is left out."""
    repo = repository_for(hub, request, place.repo)
    commit = commit_for(repo, place.revision)
    if "json" in request.headers.get("content-type", ""):
        paths = request.json["paths"]
    else:
        paths = parse_qs(request.body.decode()).get("paths", [])
    known = {*commit.files, *commit.folders}
    wanted = [path.strip("/") for path in paths]
    return as_json([_entry(repo, commit, path) for path in wanted if path in known])


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
