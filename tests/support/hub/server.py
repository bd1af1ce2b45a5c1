"""The Hub itself: its repos, its users, and what it does with a request."""

from __future__ import annotations

import contextlib
import re
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest.mock import patch

from tests.support.hub import reading, wire, writing
from tests.support.hub.contents import Kind, Repository
from tests.support.hub.folders import add_names, repositories_in
from tests.support.hub.reading import Links
from tests.support.hub.wire import Place, RefusedError, Reply, Request, Service, bound, refusal


class Hub:
    """A local Hugging Face Hub over real sockets, for a client that is none the wiser.

    root            folder of repos, see tests/support/hub/folders.py
    tokens          token -> "user", or "user:read" for one that may not write
    page            entries in a page of a listing
    https_style_401 answer a stranger without an error code, as the real Hub does; its client
                    understands that over https only

    `repos` maps "owner/name" and "datasets/owner/name" to repositories, `faults` is what goes
    wrong (wire.py), `log` has an entry per request, `leaks` the addresses of the CDN
    that were asked with a token, `errors` the bugs of the Hub itself: leaving `running` raises the
    first of them.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        tokens: Mapping[str, str] | None = None,
        page: int = 1000,
        https_style_401: bool = False,
    ) -> None:
        self.tokens = dict(tokens or {})
        self.page = page
        self.https_style_401 = https_style_401
        self.faults: list[dict[str, Any]] = []
        self.log: list[dict[str, Any]] = []
        self.leaks: list[str] = []
        self.errors: list[BaseException] = []
        self.url = self.cdn = ""
        self.links = Links()
        self._service: Service | None = None
        self._sockets: list[socket.socket] = []
        self._ports = (0, 0)
        found = repositories_in(Path(root)) if root else []
        self.repos: dict[str, Repository] = {repo.key: repo for repo in found}

    def add_names(
        self,
        repo_id: str,
        names: Iterable[str],
        folder: Path,
        main: str | None = None,
        *,
        kind: Kind = "model",
        aliases: Mapping[str, str] | None = None,
        pretend_nbytes: int | None = None,
        hashed: bool = True,
    ) -> Repository:
        """Add a repo with a branch per name, of which each serves the files of one folder.

        Each name has a commit of its own and weights of its own, made from the folder's when they
        are read (contents.py): valid, finite, near to the original. A safetensors
        file that ends behind its header (`write_headers`) is served as long as the header says.
        `aliases` are further names, with commits of their own, that serve another's files. `main`
        is the name where main points; None is a main with a README alone.

        `pretend_nbytes` is what the weights of one name claim to weigh in all. Headers and ranges
        can be read then, but the sha256 is made up, as it is if not `hashed`: a download that is
        checked fails. Otherwise every sha256 is true, which costs reading every name's weights.
        """
        repo = Repository(repo_id, kind)
        add_names(
            repo,
            names,
            folder,
            main=main,
            aliases=aliases,
            pretend_nbytes=pretend_nbytes,
            hashed=hashed,
        )
        self.repos[repo.key] = repo
        return repo

    def asked(self, pattern: str) -> list[dict[str, Any]]:
        """Return the entries of the log whose `METHOD /path` has the pattern in it."""
        return [e for e in self.log if re.search(pattern, f"{e['method']} {e['path']}")]

    # ---------------------------------------------- running

    @contextlib.contextmanager
    def running(self, port: int = 0) -> Iterator[Hub]:
        """Serve until the end of the block, to a client that is online and never sleeps."""
        from huggingface_hub import constants
        from huggingface_hub.utils import _http

        awake = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        self.start(port)
        try:
            with (
                patch.object(constants, "HF_HUB_OFFLINE", False),
                patch.object(constants, "HF_HUB_DISABLE_XET", True),  # not served here
                patch.object(_http, "time", awake),
            ):
                yield self
        finally:
            self.stop()
            self._release()
            self.url = self.cdn = ""
        if self.errors:
            raise self.errors[0]

    def start(self, port: int = 0) -> None:
        """Serve on a port, and as the CDN on the next; after a `stop`, on those it had."""
        if not self.url:
            self._hold((port, port + 1 if port else 0))
        self._service = Service(self, self._sockets)

    def stop(self) -> None:
        """Break every connection and refuse new ones."""
        if self._service:
            self._service.stop()
            self._service = None
            self._hold(self._ports)

    def _hold(self, ports: tuple[int, int]) -> None:
        """Take the ports without listening: whoever connects is refused."""
        self._release()
        self._sockets = [bound(port) for port in ports]
        own, cdn = (held.getsockname()[1] for held in self._sockets)
        self._ports = (own, cdn)
        self.url, self.cdn = f"http://127.0.0.1:{own}", f"http://127.0.0.1:{cdn}"

    def _release(self) -> None:
        for held in self._sockets:
            held.close()

    # ---------------------------------------------- answering

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: wire.Send
    ) -> None:
        """Answer one request: the ASGI interface."""
        request = await self._request(scope, receive)
        entry = self._note(request)
        with contextlib.ExitStack() as stack:
            stack.push(self._remember)
            fault = wire.take(self.faults, request)
            request = replace(request, fault=fault)
            await wire.hold(fault)
            if fault.get("reset") == 0:
                return wire.reset(send)
            await wire.deliver(send, request, self._answer(request), entry)

    async def _request(
        self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]]
    ) -> Request:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return Request(
            method=scope["method"],
            path=scope["raw_path"].decode().partition("?")[0],
            query_text=scope["query_string"].decode(),
            headers={k.decode().lower(): v.decode("latin-1") for k, v in scope["headers"]},
            body=body,
            at_cdn=scope["server"][1] == self._ports[1],
        )

    def _note(self, request: Request) -> dict[str, Any]:
        token = "authorization" in request.headers
        if request.at_cdn and token:
            self.leaks.append(request.path)
        entry = {
            "t": time.time(),
            "method": request.method,
            "path": request.path,
            "query": request.query_text,
            "range": request.headers.get("range"),
            "auth": token,
            "cdn": request.at_cdn,
            "ua": request.headers.get("user-agent"),
            "status": None,
            "sent": 0,
        }
        self.log.append(entry)
        return entry

    def _answer(self, request: Request) -> Reply:
        """Return the true answer, or what a fault has in its place."""
        said: dict[str, Any] = {"X-Request-Id": f"Root={uuid.uuid4().hex}"}
        try:
            reply = wire.injected(dict(request.fault)) or answer(self, request)
        except RefusedError as refused:
            reply = refused.reply
        said |= reply.headers
        changed = {name.lower() for name in request.fault.get("headers", {})}
        said = {name: value for name, value in said.items() if name.lower() not in changed}
        return replace(reply, headers=said | request.fault.get("headers", {}))

    def _remember(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):  # what stops a task is no error
            self.errors.append(error)


# Which address is answered by what. `{revision}` stands for one segment, `{path...}` for all that
# are left, `{kinds}` for `models` or `datasets`. Segments are split before they are decoded, so a
# revision may contain a slash.

Handler = Callable[[Hub, Request, Place], Reply]
REPO = "api/{kinds}/{owner}/{name}"
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "cdn/{path}", reading.download),
    ("PUT", "cdn/upload/{path}", reading.upload),
    ("POST", "cdn/verify", reading.verify),
    ("GET", "api/whoami-v2", reading.whoami),
    ("GET", "api/agent-harnesses", reading.harnesses),
    ("POST", "api/validate-yaml", writing.validate_yaml),
    ("GET", "api/resolve-cache/{kinds}/{owner}/{name}/{revision}/{path...}", reading.resolve_cache),
    ("GET", "api/{kinds}", reading.repositories),
    ("GET", REPO, reading.info),
    ("GET", REPO + "/revision/{revision}", reading.info),
    ("GET", REPO + "/refs", reading.refs),
    ("GET", REPO + "/tree/{revision}/{path...}", reading.tree),
    ("POST", REPO + "/paths-info/{revision}", reading.paths_info),
    ("POST", REPO + "/preupload/{revision}", writing.preupload),
    ("POST", REPO + "/commit/{revision}", writing.create_commit),
    ("GET", REPO + "/discussions", writing.list_all),
    ("POST", REPO + "/discussions", writing.create),
    ("GET", REPO + "/discussions/{number}", writing.details),
    ("POST", REPO + "/discussions/{number}/merge", writing.merge),
    ("GET", "{kinds}/{owner}/{name}/resolve/{revision}/{path...}", reading.resolve),
    ("GET", "{owner}/{name}/resolve/{revision}/{path...}", reading.resolve),
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
