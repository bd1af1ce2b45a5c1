"""Who asks, and what they may see: the refusals of the real Hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.support.hub.contents import Commit, Repository
from tests.support.hub.exchange import Request, refusal

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
