"""Which address is answered by what.

`{revision}` stands for one segment, `{path...}` for all that are left, `{kinds}` for `models` or
`datasets`. Segments are split before they are decoded, so a revision may contain a slash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.hub import discussions, files, listings, writing
from tests.support.hub.exchange import Place, Reply, Request, refusal

if TYPE_CHECKING:
    from tests.support.hub.server import Hub

Handler = Callable[["Hub", Request, Place], Reply]
REPO = "api/{kinds}/{owner}/{name}"
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "cdn/{path}", files.download),
    ("PUT", "cdn/upload/{path}", files.upload),
    ("POST", "cdn/verify", files.verify),
    ("GET", "api/whoami-v2", listings.whoami),
    ("GET", "api/agent-harnesses", listings.harnesses),
    ("POST", "api/validate-yaml", writing.validate_yaml),
    ("GET", "api/resolve-cache/{kinds}/{owner}/{name}/{revision}/{path...}", files.resolve_cache),
    ("GET", "api/{kinds}", listings.repositories),
    ("GET", REPO, listings.info),
    ("GET", REPO + "/revision/{revision}", listings.info),
    ("GET", REPO + "/refs", listings.refs),
    ("GET", REPO + "/commits/{revision}", listings.commits),
    ("GET", REPO + "/tree/{revision}/{path...}", listings.tree),
    ("POST", REPO + "/paths-info/{revision}", listings.paths_info),
    ("GET", REPO + "/auth-check", listings.allowed),
    ("POST", REPO + "/preupload/{revision}", writing.preupload),
    ("POST", REPO + "/commit/{revision}", writing.create_commit),
    ("GET", REPO + "/discussions", discussions.list_all),
    ("POST", REPO + "/discussions", discussions.create),
    ("GET", REPO + "/discussions/{number}", discussions.details),
    ("POST", REPO + "/discussions/{number}/comment", discussions.comment),
    ("POST", REPO + "/discussions/{number}/status", discussions.change_status),
    ("POST", REPO + "/discussions/{number}/merge", discussions.merge),
    ("GET", "{kinds}/{owner}/{name}/resolve/{revision}/{path...}", files.resolve),
    ("GET", "{owner}/{name}/resolve/{revision}/{path...}", files.resolve),
    ("POST", "{kinds}/{owner}/{name}/info/lfs/objects/batch", writing.lfs_batch),
    ("POST", "{owner}/{name}/info/lfs/objects/batch", writing.lfs_batch),
)


def answer(hub: Hub, request: Request) -> Reply:
    """Return what the Hub says to a request."""
    method = "GET" if request.method == "HEAD" else request.method
    for wanted, pattern, handler in ROUTES:
        words = _match(pattern.split("/"), request.segments) if wanted == method else None
        if words is not None and request.at_cdn == pattern.startswith("cdn/"):
            return handler(hub, request, _place(words))
    raise refusal(404, "Sorry, we can't find the page you are looking for.")


def _match(pattern: list[str], segments: list[str]) -> dict[str, str] | None:
    """Return the words in an address that a pattern names, or None if it is another's."""
    words: dict[str, str] = {}
    for place, part in enumerate(pattern):
        if part.endswith("...}"):
            return words | {part[1:-4]: "/".join(segments[place:])}
        if place >= len(segments):
            return None
        word = segments[place]
        if not part.startswith("{"):
            if word != part:
                return None
        elif part == "{kinds}" and word not in ("models", "datasets"):
            return None
        else:
            words[part[1:-1]] = word
    return words if len(pattern) == len(segments) else None


def _place(words: dict[str, Any]) -> Place:
    kinds = words.pop("kinds", "models")
    place = Place(**words)
    name = place.name.removesuffix(".git")
    return replace(place, kind="dataset" if kinds == "datasets" else "model", name=name)
