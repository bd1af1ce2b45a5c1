"""The Hub itself: its repos, its users, and what it does with a request."""

import contextlib
import re
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
from urllib.parse import unquote

from tests.support.hub import answers, wire
from tests.support.hub.folders import repositories_in, with_names
from tests.support.hub.wire import Place, RefusedError, Request, Service, bound, refusal


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

    def __init__(self, root=None, tokens=None, page=1000, https_style_401=False):
        self.tokens = dict(tokens or {})
        self.page = page
        self.https_style_401 = https_style_401
        self.faults = []
        self.log = []
        self.leaks = []
        self.errors = []
        self.url = self.cdn = ""
        self.links = answers.Links()
        self._service = None
        self._sockets = []
        self._ports = (0, 0)
        found = repositories_in(Path(root)) if root else ()
        self.repos = {repo.key: repo for repo in found}

    def add_names(self, repo, names, folder, **more):
        """Add a repo with a branch per name, of which each serves the files of one folder.

        Each name has a commit of its own and weights with ids of their own, made up. A safetensors
        file that ends behind its header (`write_headers`) is served as long as the header says, or
        as `pretend_nbytes` does: headers and ranges can be read, what the file lacks is zero, and a
        download that is checked fails. `aliases` are further names, with commits of their own, that
        serve another's files. `main` is the name where main points; None is a main with a README
        alone.
        """
        self.repos[repo] = with_names(repo, names, folder, **more)

    def asked(self, pattern):
        """Return the entries of the log whose `METHOD /path` has the pattern in it."""
        return [e for e in self.log if re.search(pattern, f"{e['method']} {e['path']}")]

    # ---------------------------------------------- running

    @contextlib.contextmanager
    def running(self, port=0):
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

    def start(self, port=0):
        """Serve on a port, and as the CDN on the next; after a `stop`, on those it had."""
        if not self.url:
            self._hold((port, port + 1 if port else 0))
        self._service = Service(self, self._sockets)

    def stop(self):
        """Break every connection and refuse new ones."""
        if self._service:
            self._service.stop()
            self._service = None
            self._hold(self._ports)

    def _hold(self, ports):
        """Take the ports without listening: whoever connects is refused."""
        self._release()
        self._sockets = [bound(port) for port in ports]
        own, cdn = (held.getsockname()[1] for held in self._sockets)
        self._ports = (own, cdn)
        self.url, self.cdn = f"http://127.0.0.1:{own}", f"http://127.0.0.1:{cdn}"

    def _release(self):
        for held in self._sockets:
            held.close()

    # ---------------------------------------------- answering

    async def __call__(self, scope, receive, send):
        """Answer one request: the ASGI interface."""
        request = await self._request(scope, receive)
        entry = self._note(request)
        try:
            fault = wire.take(self.faults, request)
            request = replace(request, fault=fault)
            await wire.hold(fault)
            if fault.get("reset") == 0:
                return wire.reset(send)
            await wire.deliver(send, request, self._answer(request), entry)
        except Exception as error:
            self.errors.append(error)
            raise

    async def _request(self, scope, receive):
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

    def _note(self, request):
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

    def _answer(self, request):
        """Return the true answer, or what a fault has in its place."""
        said = {"X-Request-Id": f"Root={uuid.uuid4().hex}"}
        try:
            reply = wire.injected(dict(request.fault)) or answer(self, request)
        except RefusedError as refused:
            (reply,) = refused.args
        said |= reply.headers
        changed = {name.lower() for name in request.fault.get("headers", {})}
        said = {name: value for name, value in said.items() if name.lower() not in changed}
        return replace(reply, headers=said | request.fault.get("headers", {}))


# Which address is answered by what. `{revision}` stands for one segment, `{path...}` for all that
# are left, `{kinds}` for `models` or `datasets`. Segments are split before they are decoded, so a
# revision may contain a slash.

REPO = "api/{kinds}/{owner}/{name}"
ROUTES = (
    ("GET", "cdn/{path}", answers.download),
    ("PUT", "cdn/upload/{path}", answers.upload),
    ("POST", "cdn/verify", answers.verify),
    ("GET", "api/whoami-v2", answers.whoami),
    ("GET", "api/agent-harnesses", answers.harnesses),
    ("POST", "api/validate-yaml", answers.validate_yaml),
    ("GET", "api/resolve-cache/{kinds}/{owner}/{name}/{revision}/{path...}", answers.resolve_cache),
    ("GET", "api/{kinds}", answers.repositories),
    ("GET", REPO, answers.info),
    ("GET", REPO + "/revision/{revision}", answers.info),
    ("GET", REPO + "/refs", answers.refs),
    ("GET", REPO + "/tree/{revision}/{path...}", answers.tree),
    ("POST", REPO + "/paths-info/{revision}", answers.paths_info),
    ("POST", REPO + "/preupload/{revision}", answers.preupload),
    ("POST", REPO + "/commit/{revision}", answers.create_commit),
    ("GET", REPO + "/discussions", answers.list_all),
    ("POST", REPO + "/discussions", answers.create),
    ("GET", REPO + "/discussions/{number}", answers.details),
    ("POST", REPO + "/discussions/{number}/merge", answers.merge),
    ("GET", "{kinds}/{owner}/{name}/resolve/{revision}/{path...}", answers.resolve),
    ("GET", "{owner}/{name}/resolve/{revision}/{path...}", answers.resolve),
    ("POST", "{kinds}/{owner}/{name}/info/lfs/objects/batch", answers.lfs_batch),
    ("POST", "{owner}/{name}/info/lfs/objects/batch", answers.lfs_batch),
)


def _part(found):
    """Return the expression of a word in a route."""
    name, slash = found[1], "/" * found[0].startswith("/")
    if name == "path...":
        return "(?:/(?P<path>.*))?"
    return f"{slash}(?P<{name}>{'models|datasets' if name == 'kinds' else '[^/]+'})"


PATTERNS = [(m, re.compile(re.sub(r"/?\{(.+?)\}", _part, path)), a) for m, path, a in ROUTES]


def answer(hub, request):
    """Return what the Hub says to a request."""
    method, path = request.method.replace("HEAD", "GET"), request.path.strip("/")
    for wanted, pattern, handler in PATTERNS:
        found = pattern.fullmatch(path)
        if found and wanted == method and request.at_cdn == path.startswith("cdn/"):
            words = {k: unquote(v or "") for k, v in found.groupdict().items()}
            kind = words.pop("kinds", "models").removesuffix("s")
            words["name"] = words.get("name", "").removesuffix(".git")
            return handler(hub, request, Place(kind, **words))
    raise refusal(404, "Sorry, we can't find the page you are looking for.")
