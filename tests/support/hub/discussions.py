"""Discussions and pull requests, which the Hub numbers together."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tests.support.hub.access import repository_for, user_of, writer_of
from tests.support.hub.contents import Commit, Repository
from tests.support.hub.exchange import Place, Reply, Request, as_json, refusal
from tests.support.hub.listings import timestamp

if TYPE_CHECKING:
    from tests.support.hub.server import Hub


def _now() -> str:
    return timestamp(datetime.now(UTC))


def _event(kind: str, user: str, **data: Any) -> dict[str, Any]:
    said = {"id": uuid.uuid4().hex[:24], "type": kind, "createdAt": _now()}
    return said | {"author": {"name": user}, "data": data}


def _comment(user: str, text: str) -> dict[str, Any]:
    latest = {"raw": text, "html": text, "updatedAt": _now(), "author": {"name": user}}
    return _event("comment", user, latest=latest, edited=False, hidden=False)


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
            "createdAt": _now(),
            "status": status,
            "repo": {"name": repo.id, "type": repo.kind},
            "isPullRequest": base is not None,
            "filesWithConflicts": [],
            "changes": {"base": f"refs/heads/{base}"} if base else None,
            "events": [_comment(user, text)],
        }
    )
    if base:
        repo.branches[f"refs/pr/{number}"] = repo.branches[base]
    return number


def note_commit(repo: Repository, number: int, user: str, commit: Commit) -> None:
    """Add a commit to what happened in a pull request."""
    event = _event("commit", user, subject=commit.title, oid=commit.id)
    repo.discussions[number - 1]["events"].append(event)


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


def comment(hub: Hub, request: Request, place: Place) -> Reply:
    """Add a comment."""
    user, (_, found) = writer_of(hub, request).name, _find(hub, request, place)
    said = _comment(user, request.json["comment"])
    found["events"].append(said)
    return as_json({"newMessage": said})


def change_status(hub: Hub, request: Request, place: Place) -> Reply:
    """Close or reopen."""
    user, (_, found) = writer_of(hub, request).name, _find(hub, request, place)
    found["status"] = request.json["status"]
    event = _event("status-change", user, status=found["status"])
    found["events"].append(event)
    return as_json({"newStatus": event})


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
