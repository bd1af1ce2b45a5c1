"""The Hub's API: names, commits, trees, and the bytes of files.

Questions are those of `HfApi`, over the session that the library shares with everything in this
process. Two hooks are added to that session. One removes a token of ours from requests to any other
scheme, host or port, as for the address that confirms an upload, and gives a request of ours that
has no time limit one. The other ends the library's own repetitions where the Hub requests a pause
or fails: a request is repeated here, a bounded number of times and with a message.

A download is one attempt, because only the writer of the file knows how far it is. Commit, blob and
range are compared before the first byte is used, and bytes are passed on as they come, in pieces of
bounded size, so that a connection that breaks every few bytes still makes progress. Too few bytes
are a transfer that broke off, too many are another file than the one listed. A server that ignores
a range is read from the file's beginning: that costs traffic alone.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2

from qaudit.errors import HubError, Interrupted
from qaudit.hub.connection import (
    ENDPOINT,
    RESUME,
    Credentials,
    DroppedError,
    Request,
    check_variables,
    dropped_by,
    dropped_response,
    endpoint_origin,
    environment_token,
    hub_headers,
    is_set,
    next_wait_seconds,
    no_file,
    not_known_offline,
    origin_of,
    refusal,
    session,
)
from qaudit.hub.names import (
    COMMIT,
    GarbledError,
    HubFile,
    Kind,
    Revision,
    files_in,
    is_repository,
    matching,
    revisions_in,
)
from qaudit.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
Say = Callable[[str], object]
"""Shows a message: a retry, a wait."""

PIECE_NBYTES = 1 << 20
_MOST_PAGES = 200
_MOST_READ_NBYTES = 101_000_000  # more than the longest header, less than a file of weights

_active: list[Client] = []
"""The clients that call the library just now; its own threads send uploads."""

_calling = threading.local()
"""The client that this thread calls the library for."""


class Client:
    """The API of one Hub; may be used by several threads."""

    def __init__(
        self,
        endpoint: str,
        *,
        token: str | None = None,
        offline: bool = False,
        pause: Callable[[float], object] | None = None,
        say: Say = lambda text: None,
        timeout_seconds: float = 30.0,
    ) -> None:
        """Without a `pause` of its own, `break_off` ends a wait."""
        self.endpoint = endpoint.rstrip("/")
        self.offline = offline
        self.say = say
        self.calls = 0  # of the API, however often each had to be repeated
        self.requests = 0  # redirects and repetitions too
        self.logged_in = bool(token)
        self.credentials = Credentials(self.endpoint, token or None)
        self.timeout_seconds = timeout_seconds
        self.origin = endpoint_origin(self.endpoint)
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._bodies: set[httpx2.Response] = set()
        self.pause = pause or self._stopped.wait

    @classmethod
    def from_environment(cls, *, say: Say = lambda text: None, patient: bool = True) -> Client:
        """Return the client of the environment's Hub; one that is not patient never waits long."""
        check_variables()
        offline = is_set("HF_HUB_OFFLINE") or is_set("TRANSFORMERS_OFFLINE")
        anonymous = offline or is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN")
        seconds = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or 30)
        return cls(
            os.environ.get("HF_ENDPOINT") or ENDPOINT,
            token=None if anonymous else environment_token(),
            offline=offline,
            say=say,
            pause=None if patient else lambda seconds: None,
            timeout_seconds=seconds if patient else 5.0,
        )

    def break_off(self) -> None:
        """End every transfer and every wait of every thread, and send nothing any more."""
        self._stopped.set()
        with self._lock:
            bodies = list(self._bodies)
        for response in bodies:  # closing it would not wake a thread that reads
            with suppress(OSError, KeyError, AttributeError):
                stream = response.extensions["network_stream"]
                socket.socket.shutdown(stream.get_extra_info("socket"), socket.SHUT_RDWR)

    # ------------------------------------------------------------------------------- questions

    def revisions(self, repo: str, kind: Kind = "model") -> tuple[Revision, ...]:
        request = Request(f"the revisions of `{repo}`", checked(repo), kind)
        refs = self.ask(request, lambda api: api.list_repo_refs(repo, repo_type=kind))
        rows = [(ref.name, ref.target_commit, "branch") for ref in refs.branches]
        rows += [(ref.name, ref.target_commit, "tag") for ref in refs.tags]
        return self._parsed(request, revisions_in, rows)

    def commit(self, repo: str, revision: str = "main", kind: Kind = "model") -> str:
        call = f"the commit of `{revision}` in `{repo}`"
        request = Request(call, checked(repo), kind, revision)
        info = self.ask(request, lambda api: api.repo_info(repo, repo_type=kind, revision=revision))
        return self._parsed(request, lambda sha: matching(COMMIT, sha, "the commit"), info.sha)

    def files(
        self, repo: str, commit: str, folder: str | None = None, *, kind: Kind = "model"
    ) -> tuple[HubFile, ...]:
        """Return every file at a commit in all folders, or those of one folder alone."""
        where = f"at `{commit}`" if folder is None else f"in `{folder}`"
        request = Request(f"the files of `{repo}` {where}", checked(repo), kind, commit)
        how: Any = {"recursive": folder is None, "revision": commit, "repo_type": kind}
        return self._listed(request, lambda api: api.list_repo_tree(repo, folder or None, **how))

    def file(self, repo: str, commit: str, path: str, *, kind: Kind = "model") -> HubFile:
        request = Request(f"`{path}` of `{repo}`", checked(repo), kind, commit, path)
        files = self._listed(
            request, lambda api: api.get_paths_info(repo, path, revision=commit, repo_type=kind)
        )
        if not files:
            raise no_file(request)
        if [file.path for file in files] != [path]:
            raise self.garbled(request, "it is about other files")
        return files[0]

    def repositories(self, pattern: str) -> tuple[str, ...]:
        """Return the repositories of one owner whose names match `owner/name-*`."""
        owner, _, name = pattern.partition("/")
        request = Request(f"the repositories `{pattern}`", checked(owner))
        prefix = re.split(r"[*?\[]", name)[0] or None
        names = self.ask(
            request, lambda api: [m.id for m in api.list_models(author=owner, search=prefix)]
        )
        return tuple(sorted({n for n in names if is_repository(n) and fnmatchcase(n, pattern)}))

    def _listed(self, request: Request, call: Callable[[HfApi], Any]) -> tuple[HubFile, ...]:
        """Return the files that a call lists; folders and links of git are none."""
        rows: list[tuple[Any, ...]] = []
        for entry in self.ask(request, lambda api: list(call(api))):
            if hasattr(entry, "blob_id"):
                sha256, nbytes = None, entry.size
                if entry.lfs:  # two sizes that differ are none
                    sha256 = entry.lfs.sha256
                    nbytes = nbytes if entry.lfs.size == nbytes else [nbytes, entry.lfs.size]
                rows.append((entry.path, nbytes, entry.blob_id, sha256))
        return self._parsed(request, files_in, rows)

    def ask(self, request: Request, call: Callable[[HfApi], T]) -> T:
        """Call the library; what breaks off is repeated."""
        self._require_online(request)
        with self._lock:
            self.calls += 1
        return self.with_retries(request, lambda: self.attempt(request, call))

    def attempt(self, request: Request, call: Callable[[HfApi], T]) -> T:
        """Call the library once, and raise what failed as an error of ours."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        token = self.credentials.token or False
        api = HfApi(self.endpoint, token, library_name="qaudit", library_version=__version__)
        try:
            with self._guarded():
                return call(api)
        except (HubError, DroppedError):
            raise
        except GarbledError as error:
            raise self.garbled(request, str(error)) from error
        except OfflineModeIsEnabled as error:  # the variable was set when the library was loaded
            raise not_known_offline(request) from error
        except HfHubHTTPError as error:
            raise self._failure(error.response, request) from None  # it quotes the answer
        except httpx2.HTTPError as error:
            raise self._dropped(request, error) from error
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error.__cause__, HfHubHTTPError):  # of a file in an upload
                raise self._failure(error.__cause__.response, request) from None
            if isinstance(error.__cause__, httpx2.HTTPError):
                raise self._dropped(request, error.__cause__) from error
            raise self.garbled(request, "it is not what the client needs") from error

    # ------------------------------------------------------------------------------------ bytes

    def read(
        self,
        repo: str,
        commit: str,
        path: str,
        start: int,
        stop: int,
        *,
        kind: Kind = "model",
        blob: str | None = None,
    ) -> bytes:
        """Return the bytes `start` to `stop` of a file, and of one blob only if it is named."""
        request = Request(f"a part of `{path}` of `{repo}`", checked(repo), kind, commit, path)
        self._require_online(request)
        if not 0 <= start < stop <= start + _MOST_READ_NBYTES:
            raise ValueError(f"bytes {start} to {stop}")

        def attempt() -> bytes:
            with self._body(request, f"bytes={start}-{stop - 1}", blob) as response:
                skip = self._nbytes_before(request, response, start, stop)
                if skip > _MOST_READ_NBYTES:
                    raise self.garbled(request, "it does not serve parts of files")
                data = bytearray()
                for piece in _after(skip, response, stop - start):
                    data += piece
                    if len(data) >= stop - start:
                        return bytes(data[: stop - start])
            raise DroppedError(f"it ended {stop - start - len(data)} bytes early")

        return self.with_retries(request, attempt)

    @contextmanager
    def download(
        self, repo: str, commit: str, file: HubFile, start: int, *, kind: Kind = "model"
    ) -> Generator[Iterator[bytes]]:
        """Stream a file from byte `start` in one attempt; `DroppedError` calls for another."""
        request = Request(f"`{file.path}` of `{repo}`", checked(repo), kind, commit, file.path)
        self._require_online(request)
        if not 0 <= start <= file.nbytes:
            raise ValueError(f"byte {start} of {file.nbytes}")
        if start and start == file.nbytes:
            yield iter(())
            return
        wanted = f"bytes={start}-" if start else None
        with self._body(request, wanted, file.blob) as response:
            linked = hub_headers(response, self.origin).get("x-linked-size", file.nbytes)
            if str(linked) != str(file.nbytes):
                raise self.garbled(request, "it offers another size than it listed")
            skip = self._nbytes_before(request, response, start, file.nbytes)
            yield self._rest(request, response, skip, file.nbytes - start)

    def _rest(
        self, request: Request, response: httpx2.Response, skip: int, nbytes: int
    ) -> Iterator[bytes]:
        """Yield `nbytes` after the first `skip`, as they come, and then the body must end."""
        remaining = nbytes
        for piece in _after(skip, response, nbytes):
            if len(piece) > remaining:
                raise self.garbled(request, "it sends more bytes than it listed")
            remaining -= len(piece)
            yield piece
        if remaining:
            raise DroppedError(f"it ended {remaining} bytes early")

    @contextmanager
    def _body(
        self, request: Request, wanted: str | None, blob: str | None
    ) -> Generator[httpx2.Response]:
        """Open the bytes of a file, on whichever server the Hub keeps them."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(
            request.repo, request.path or "", repo_type=request.kind, revision=request.revision,
            endpoint=self.endpoint,
        )  # fmt: skip
        # Hashes are of the bytes as they are stored, so no encoding is requested.
        headers = {"Accept-Encoding": "identity", "User-Agent": f"qaudit/{__version__}"}
        headers |= {"Range": wanted} if wanted else {}
        if self.credentials.token:
            headers["Authorization"] = f"Bearer {self.credentials.token}"
        try:
            with self._guarded() as http:
                outgoing = http.build_request("GET", url, headers=headers)
                response = http.send(outgoing, stream=True, follow_redirects=True)
        except (httpx2.HTTPError, httpx2.InvalidURL, RuntimeError) as error:
            raise self._dropped(request, error) from error
        with self._lock:
            self._bodies.add(response)
        try:
            if response.status_code not in (200, 206):
                raise self._failure(response, request)
            told = hub_headers(response, self.origin)
            tag = told.get("x-linked-etag") or told.get("etag", "")
            commit = told.get("x-repo-commit", "")
            for what, value, expected in (
                ("commit", commit, request.revision),
                ("blob", tag, blob),
            ):
                name = value.removeprefix("W/").strip('"')
                if expected is not None and name != expected:
                    shown = ascii(name)[1:-1][:64] if name else "nothing"
                    raise HubError(
                        f"the Hub offers another {what} for {request.where}: `{shown}`, not "
                        f"`{expected}`",
                        hint="the server, or a proxy in between, serves other files than it lists",
                    )
            if response.headers.get("content-encoding", "identity") != "identity":
                raise self.garbled(request, "it comes in an encoding that was not requested")
            yield response
        finally:
            with self._lock:
                self._bodies.discard(response)
            response.close()

    def _nbytes_before(
        self, request: Request, response: httpx2.Response, start: int, stop: int
    ) -> int:
        """Return how many bytes come before the requested ones: none if the range was honoured."""
        if response.status_code != 206:
            return start
        sent = response.headers.get("content-range", "")
        match = re.match(r"bytes (\d{1,18})-(\d{1,18})/", sent)
        if not match or (int(match[1]), int(match[2]) + 1) != (start, stop):
            raise self.garbled(request, "it sends another part than it was asked for")
        return 0

    # --------------------------------------------------------------------------------- failures

    @contextmanager
    def _guarded(self) -> Generator[httpx2.Client]:
        """Open the library's session with our hooks, which work for this client meanwhile."""
        shared = session()
        hooks = shared.event_hooks
        if _before not in hooks["request"]:
            shared.event_hooks = {
                "request": [*hooks["request"], _before],
                "response": [*hooks["response"], _after_answer],
            }
        _calling.client, _calling.requests = self, 0
        _active.append(self)
        try:
            yield shared
        finally:
            _active.remove(self)
            _calling.client = None

    def with_retries(self, request: Request, attempt: Callable[[], T]) -> T:
        """Repeat what broke off: a bounded number of times, each with a message."""
        failures = 0
        while not self._stopped.is_set():
            try:
                return attempt()
            except DroppedError as dropped:
                failures += 1
                wait = next_wait_seconds(dropped, failures, request.call, self.endpoint)
                if not self._stopped.is_set():
                    why = f"the Hub asks to wait {wait:.0f} s ({dropped.status})"
                    if dropped.wait_seconds is None:
                        why = f"{request.call}: {dropped.reason}; trying again in {wait:.0f} s"
                    self.say(why)
                    self.pause(wait)
        raise Interrupted(f"stopped while asking for {request.call}", hint=RESUME)

    def garbled(self, request: Request, why: str) -> GarbledAnswerError:
        return GarbledAnswerError(
            f"the answer of `{self.endpoint}` about {request.call} makes no sense: {why}",
            hint="see whether `HF_ENDPOINT` is a Hub, and whether a proxy is in between",
        )

    def _parsed(self, request: Request, parse: Callable[[Any], T], answer: Any) -> T:
        try:
            return parse(answer)
        except GarbledError as error:
            raise self.garbled(request, str(error)) from error

    def _dropped(self, request: Request, error: Exception) -> DroppedError | HubError:
        if isinstance(error, httpx2.TooManyRedirects):
            return self.garbled(request, "its redirects do not end")
        if isinstance(error, httpx2.UnsupportedProtocol | httpx2.InvalidURL):
            return self.garbled(request, "it redirects to an address that cannot be trusted")
        return dropped_by(error)

    def _failure(self, response: httpx2.Response, request: Request) -> DroppedError | HubError:
        """Return the error for a response that is a refusal, or none at all."""
        status, headers = response.status_code, response.headers
        if dropped := dropped_response(response):
            return dropped
        if status == 416:
            return self.garbled(request, "it has fewer bytes than it listed")
        if origin_of(str(response.url)) != self.origin:
            # A signed link that has expired; the Hub signs a fresh one when asked again.
            return DroppedError(f"the link it gave answers {status}", status=status)
        return refusal(status, headers, request, self.credentials)

    def _require_online(self, request: Request) -> None:
        if self.offline:
            raise not_known_offline(request)


class GarbledAnswerError(HubError):
    """An answer of the Hub makes no sense."""


def _before(request: httpx2.Request) -> None:
    """Remove a token of ours from a request to another server; limit the time of ours."""
    token = request.headers.get("Authorization", "").removeprefix("Bearer ")
    origins = [client.origin for client in list(_active) if client.credentials.token == token]
    if origins and origin_of(str(request.url)) not in origins:
        del request.headers["Authorization"]
    client: Client | None = getattr(_calling, "client", None)
    if client is None:
        return
    with client._lock:
        client.requests += 1
    _calling.requests += 1
    if _calling.requests > _MOST_PAGES:
        raise GarbledError("its pages do not end")
    if not any(request.extensions.get("timeout", {}).values()):
        limits = httpx2.Timeout(client.timeout_seconds).as_dict()
        request.extensions = {**request.extensions, "timeout": limits}


def _after_answer(response: httpx2.Response) -> None:
    """End the library's own repetitions, which wait without a bound and a word."""
    dropped = dropped_response(response)
    if dropped is not None and getattr(_calling, "client", None) is not None:
        raise dropped


def _after(skip: int, response: httpx2.Response, nbytes: int) -> Iterator[bytes]:
    """Yield the body behind its first bytes, in small pieces, as it comes."""
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:18]) < skip + nbytes:
        raise DroppedError(f"it announces {announced[:18]} bytes where {skip + nbytes} are due")
    try:
        for whole in response.iter_raw():
            piece, skip = whole[skip:], max(0, skip - len(whole))
            for at in range(0, len(piece), PIECE_NBYTES):
                yield piece[at : at + PIECE_NBYTES]
    except httpx2.HTTPError as error:
        raise dropped_by(error) from error


def checked(repo: str) -> str:
    """Return the name of a repository, or an owner, if it is one."""
    if not is_repository(repo):
        raise HubError(
            f"`{repo}` is no name of a repository", hint="a name on the Hub looks like `org/name`"
        )
    return repo
