"""What may be written: commits, uploads and pull requests."""

from __future__ import annotations

import base64
import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tests.support.hub.contents import Blob, Commit, Repository, blob_in_memory, is_large
from tests.support.hub.reading import (
    commit_for,
    front_matter,
    repository_for,
    timestamp,
    user_of,
    writer_of,
)
from tests.support.hub.wire import Place, Reply, Request, as_json, refusal

if TYPE_CHECKING:
    from tests.support.hub.server import Hub


def open_discussion(
    repo: Repository,
    title: str,
    text: str,
    user: str,
    *,
    base: str | None,
    status: str = "open",
) -> int:
    """Open a discussion, or a pull request against a `base`, and return its number."""
    number = len(repo.discussions) + 1
    repo.discussions.append(
        {
            "title": title,
            "num": number,
            "author": {"name": user},
            "createdAt": timestamp(datetime.now(UTC)),
            "status": status,
            "repo": {"name": repo.id, "type": repo.kind},
            "isPullRequest": base is not None,
            "filesWithConflicts": [],
            "changes": {"base": f"refs/heads/{base}"} if base else None,
            "events": [],
        }
    )
    if base:
        repo.branches[f"refs/pr/{number}"] = repo.branches[base]
    return number


def list_all(hub: Hub, request: Request, place: Place) -> Reply:
    """List discussions, pull requests, or both."""
    repo, kind = repository_for(hub, request, place.repo), request.query.get("type", "all")
    wanted = [
        one
        for one in repo.discussions
        if kind == "all" or one["isPullRequest"] == (kind == "pull_request")
    ]
    count = {"count": len(wanted), "start": 0, "numClosedDiscussions": 0}
    return as_json({"discussions": wanted, **count})


def create(hub: Hub, request: Request, place: Place) -> Reply:
    """Open what a user asks for."""
    user, repo = writer_of(hub, request).name, repository_for(hub, request, place.repo)
    asked = request.json
    as_request = bool(asked.get("pullRequest"))
    base, status = ("main", "draft") if as_request else (None, "open")
    text = asked.get("description", "")
    number = open_discussion(repo, asked["title"], text, user, base=base, status=status)
    return as_json({"num": number, "pullRequest": as_request})


def _find(hub: Hub, request: Request, place: Place) -> tuple[Repository, dict[str, Any]]:
    repo = repository_for(hub, request, place.repo)
    if not place.number.isdigit() or not 0 < int(place.number) <= len(repo.discussions):
        raise refusal(404, "Discussion not found")
    return repo, repo.discussions[int(place.number) - 1]


def details(hub: Hub, request: Request, place: Place) -> Reply:
    """Return one discussion with everything that happened in it."""
    return as_json({**_find(hub, request, place)[1], "diff": ""})


def merge(hub: Hub, request: Request, place: Place) -> Reply:
    """Move main to a pull request's head."""
    user = user_of(hub, request)
    repo, found = _find(hub, request, place)
    if user is None or user.name != repo.owner:
        raise refusal(403, "Forbidden")
    head = repo.branches[f"refs/pr/{found['num']}"]
    repo.branches["main"] = head
    found["status"], found["changes"]["mergeCommitId"] = "merged", head
    return as_json({})


def validate_yaml(hub: Hub, request: Request, place: Place) -> Reply:
    """Say whether the metadata of a card can be read."""
    try:
        front_matter(request.json["content"])
    except ValueError as error:
        return as_json({"errors": [{"message": str(error)}], "warnings": []}, 400)
    return as_json({"errors": [], "warnings": []})


def preupload(hub: Hub, request: Request, place: Place) -> Reply:
    """Say which files go into the commit and which to the CDN first."""
    writer_of(hub, request)
    commit = commit_for(repository_for(hub, request, place.repo), place.revision)
    files = []
    for path, nbytes in ((file["path"], file["size"]) for file in request.json["files"]):
        mode = "lfs" if is_large(path, nbytes) else "regular"
        known = {"oid": commit.files[path].etag} if path in commit.files else {}
        files.append({"path": path, "shouldIgnore": False, "uploadMode": mode, **known})
    return as_json({"files": files})


def lfs_batch(hub: Hub, request: Request, place: Place) -> Reply:
    """Say where large files are to be uploaded; what is there already needs no upload."""
    writer_of(hub, request)
    repo = repository_for(hub, request, place.repo)
    objects = []
    for wanted in request.json["objects"]:
        said = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] not in repo.large:
            link = {"href": f"{hub.cdn}/cdn/upload/{wanted['oid']}", "header": {}}
            verify = {"href": f"{hub.cdn}/cdn/verify", "header": {}}
            said["actions"] = {"upload": link, "verify": verify}
        objects.append(said)
    kind = {"Content-Type": "application/vnd.git-lfs+json"}
    return as_json({"transfer": "basic", "objects": objects}, headers=kind)


def create_commit(hub: Hub, request: Request, place: Place) -> Reply:
    """Add a commit to a branch, to an own pull request, or as a new one."""
    user, repo = writer_of(hub, request).name, repository_for(hub, request, place.repo)
    lines = [json.loads(line) for line in request.body.splitlines() if line.strip()]
    head = next(line["value"] for line in lines if line["key"] == "header")
    as_request = request.flag("create_pr")
    parent, wanted = commit_for(repo, place.revision), head.get("parentCommit")
    if wanted and not parent.id.startswith(wanted):
        if not as_request:
            raise refusal(412, "A commit has happened since. Please refresh and try again.")
        parent = commit_for(repo, wanted)
    number = re.fullmatch(r"refs/pr/(\d+)", place.revision)
    author = repo.discussions[int(number[1]) - 1]["author"]["name"] if number else repo.owner
    if not as_request and user not in (author, repo.owner):
        text = "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request"
        raise refusal(403, text)
    files = _changed(repo, parent, lines)
    title, message = head["summary"], head.get("description", "")
    branch, said = place.revision, {}
    if as_request:
        opened = open_discussion(repo, title, message, user, base=place.revision)
        branch = f"refs/pr/{opened}"
        said["pullRequestUrl"] = f"{hub.url}/{repo.key}/discussions/{opened}"
    new = repo.commit(files, title, parent=parent.id, branch=branch)
    link = f"{hub.url}/{repo.key}/commit/{new.id}"
    said |= {"commitOid": new.id, "commitUrl": link, "hookOutput": ""}
    return as_json({"success": True, **said})


def _changed(repo: Repository, parent: Commit, lines: list[dict[str, Any]]) -> dict[str, Blob]:
    """Return the parent's files after the operations of a commit."""
    files = dict(parent.files)
    for key, value in ((line["key"], line["value"]) for line in lines):
        if key == "file":
            data = base64.b64decode(value["content"])
            files[value["path"]] = blob_in_memory(value["path"], data)
        elif key == "lfsFile":
            if value["oid"] not in repo.large:
                raise refusal(400, f"LFS object {value['oid']} is missing")
            files[value["path"]] = repo.large[value["oid"]]
        elif key == "deletedFile" and files.pop(value["path"], None) is None:
            raise refusal(404, "A file with this name doesn't exist", "EntryNotFound")
    return files
