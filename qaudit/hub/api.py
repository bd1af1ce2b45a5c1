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
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2

from qaudit.errors import HubError, Interrupted, UnreachableError
from qaudit.hub.answers import (
    COMMIT,
    ENDPOINT,
    RESUME,
    TRIES,
    TRIES_UNREACHED,
    Credentials,
    DroppedError,
    GarbledError,
    HubFile,
    Kind,
    Request,
    Revision,
    check_variables,
    dropped_response,
    endpoint_origin,
    environment_token,
    files_in,
    is_repository,
    is_set,
    matching,
    no_file,
    not_known_offline,
    origin_of,
    refusal,
    revisions_in,
    session,
    wait_seconds,
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
        self.stopped, self._lock = threading.Event(), threading.Lock()
        self._bodies: set[httpx2.Response] = set()
        self.pause = pause or self.stopped.wait

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
        self.stopped.set()
        with self._lock:
            bodies = list(self._bodies)
        for response in bodies:  # closing it would not wake a thread that reads
            with suppress(OSError, KeyError, AttributeError):
                stream = response.extensions["network_stream"]
                socket.socket.shutdown(stream.get_extra_info("socket"), socket.SHUT_RDWR)

    # ------------------------------------------------------------------------------- questions

    def revisions(self, repo: str, kind: Kind = "model") -> tuple[Revision, ...]:
        def read(api: HfApi) -> tuple[Revision, ...]:
            refs = api.list_repo_refs(repo, repo_type=kind)
            named = [(ref, "branch") for ref in refs.branches] + [(ref, "tag") for ref in refs.tags]
            return revisions_in([(ref.name, ref.target_commit, what) for ref, what in named])

        return self.ask(Request(f"the revisions of `{repo}`", checked(repo), kind), read)

    def commit(self, repo: str, revision: str = "main", kind: Kind = "model") -> str:
        def read(api: HfApi) -> str:
            info = api.repo_info(repo, repo_type=kind, revision=revision)
            return matching(COMMIT, info.sha, "the commit")

        call = f"the commit of `{revision}` in `{repo}`"
        return self.ask(Request(call, checked(repo), kind, revision), read)

    def files(
        self, repo: str, commit: str, folder: str | None = None, *, kind: Kind = "model"
    ) -> tuple[HubFile, ...]:
        """Return every file at a commit in all folders, or those of one folder alone."""
        where = f"at `{commit}`" if folder is None else f"in `{folder}`"
        request = Request(f"the files of `{repo}` {where}", checked(repo), kind, commit)
        how: Any = {"recursive": folder is None, "revision": commit, "repo_type": kind}
        return self.ask(
            request, lambda api: _listed(api.list_repo_tree(repo, folder or None, **how))
        )

    def file(self, repo: str, commit: str, path: str, *, kind: Kind = "model") -> HubFile:
        request = Request(f"`{path}` of `{repo}`", checked(repo), kind, commit, path)
        how: Any = {"revision": commit, "repo_type": kind}
        files = self.ask(request, lambda api: _listed(api.get_paths_info(repo, path, **how)))
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
        except OfflineModeIsEnabled as error:  # the variable was set when the library was loaded
            raise not_known_offline(request) from error
        except (httpx2.HTTPError, RuntimeError, ValueError, LookupError, TypeError) as error:
            for failure in (error, error.__cause__):  # the cause, of a file in an upload
                if isinstance(failure, HfHubHTTPError):  # it quotes the answer
                    raise self._failure(failure.response, request) from None
                if isinstance(failure, httpx2.HTTPError):
                    raise self._dropped(request, failure) from error
            is_ours = isinstance(error, GarbledError)
            why = str(error) if is_ours else "it is not what the client needs"
            raise self.garbled(request, why) from error
        except AttributeError as error:
            raise self.garbled(request, "it is not what the client needs") from error

    # ------------------------------------------------------------------------------------ bytes

    def read(self, repo: str, commit: str, file: HubFile, start: int, stop: int) -> bytes:
        """Return the bytes `start` to `stop` of a file."""
        call = f"a part of `{file.path}` of `{repo}`"
        request = Request(call, checked(repo), "model", commit, file.path)
        self._require_online(request)
        if not 0 <= start < stop <= start + _MOST_READ_NBYTES:
            raise ValueError(f"bytes {start} to {stop}")

        def attempt() -> bytes:
            with self._body(request, start, stop, file.blob) as pieces:
                return b"".join(pieces)

        return self.with_retries(request, attempt)

    def download(
        self, repo: str, commit: str, file: HubFile, start: int, *, kind: Kind = "model"
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Stream a file from byte `start` in one attempt; `DroppedError` calls for another."""
        request = Request(f"`{file.path}` of `{repo}`", checked(repo), kind, commit, file.path)
        self._require_online(request)
        return self._body(request, start, file.nbytes, file.blob, whole=True)

    @contextmanager
    def _body(
        self, request: Request, start: int, stop: int, blob: str, *, whole: bool = False
    ) -> Generator[Iterator[bytes]]:
        """Open the bytes of a file, on whichever server the Hub keeps them.

        A `whole` file has `stop` bytes, and ends there.
        """
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(
            request.repo, request.path or "", repo_type=request.kind, revision=request.revision,
            endpoint=self.endpoint,
        )  # fmt: skip
        # Hashes are of the bytes as they are stored, so no encoding is requested.
        headers = {"Accept-Encoding": "identity", "User-Agent": f"qaudit/{__version__}"}
        if start or not whole:
            headers["Range"] = f"bytes={start}-" if whole else f"bytes={start}-{stop - 1}"
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
            told: dict[str, str] = {}  # by the Hub itself, also where a redirect led elsewhere
            for answer in (*response.history, response):
                if origin_of(str(answer.url)) == self.origin:
                    told |= answer.headers
            tag = told.get("x-linked-etag") or told.get("etag", "")
            for what, value, expected in (
                ("commit", told.get("x-repo-commit", ""), request.revision),
                ("blob", tag, blob),
                ("size", told.get("x-linked-size", str(stop)), str(stop) if whole else None),
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
            sent = response.headers.get("content-range", "")
            skip = start  # a server that ignores the range sends the file from its beginning
            if response.status_code == 206:
                skip = 0
                if not sent.startswith(f"bytes {start}-{stop - 1}/"):
                    raise self.garbled(request, "it sends another part than it was asked for")
            elif skip > _MOST_READ_NBYTES and not whole:
                raise self.garbled(request, "it does not serve parts of files")
            yield self._pieces(request, response, skip, stop - start, whole=whole)
        finally:
            with self._lock:
                self._bodies.discard(response)
            response.close()

    def _pieces(
        self, request: Request, response: httpx2.Response, skip: int, nbytes: int, *, whole: bool
    ) -> Iterator[bytes]:
        """Yield the `nbytes` of a body behind its first ones, in small pieces, as they come."""
        try:
            for received in response.iter_raw():
                piece, skip = received[skip:], max(0, skip - len(received))
                if whole and len(piece) > nbytes:
                    raise self.garbled(request, "it sends more bytes than it listed")
                piece = piece[:nbytes]
                nbytes -= len(piece)
                for at in range(0, len(piece), PIECE_NBYTES):
                    yield piece[at : at + PIECE_NBYTES]
                if not nbytes and not whole:
                    return
        except httpx2.HTTPError as error:
            raise self._dropped(request, error) from error
        if nbytes:
            raise DroppedError(f"it ended {nbytes} bytes early")

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
        failures, call = 0, request.call
        while not self.stopped.is_set():
            try:
                return attempt()
            except DroppedError as error:
                dropped, failures = error, failures + 1
            wait = wait_seconds(dropped, failures, call, f"tells {call}")
            if failures >= (TRIES_UNREACHED if dropped.unreached else TRIES):
                raise UnreachableError(
                    f"`{self.endpoint}` does not tell {call}, asked {failures} times: "
                    f"{dropped.reason}",
                    hint=f"when it can be reached, {RESUME}",
                ) from dropped
            if not self.stopped.is_set():
                why = f"the Hub asks to wait {wait:.0f} s ({dropped.status})"
                if dropped.wait_seconds is None:
                    why = f"{call}: {dropped.reason}; trying again in {wait:.0f} s"
                self.say(why)
                self.pause(wait)
        raise Interrupted(f"stopped while asking for {request.call}", hint=RESUME)

    def garbled(self, request: Request, why: str) -> GarbledAnswerError:
        return GarbledAnswerError(
            f"the answer of `{self.endpoint}` about {request.call} makes no sense: {why}",
            hint="see whether `HF_ENDPOINT` is a Hub, and whether a proxy is in between",
        )

    def _dropped(self, request: Request, error: Exception) -> DroppedError | HubError:
        match error:
            case httpx2.TooManyRedirects():
                return self.garbled(request, "its redirects do not end")
            case httpx2.UnsupportedProtocol() | httpx2.InvalidURL():
                return self.garbled(request, "it redirects to an address that cannot be trusted")
            case httpx2.ConnectTimeout() | httpx2.PoolTimeout():
                return DroppedError("no connection in time", unreached=True)
            case httpx2.ConnectError() | httpx2.ProxyError():
                reason = " ".join(str(error).split()) or "refused"
                return DroppedError(f"no connection ({reason})", unreached=True)
            case httpx2.TimeoutException():
                return DroppedError("it fell silent")
            case httpx2.DecodingError():
                return DroppedError("it sent a damaged encoding")
        return DroppedError("the connection broke")

    def _failure(self, response: httpx2.Response, request: Request) -> DroppedError | HubError:
        """Return the error for a response that is a refusal, or none at all."""
        status = response.status_code
        if dropped := dropped_response(response):
            return dropped
        if status == 416:
            return self.garbled(request, "it has fewer bytes than it listed")
        if origin_of(str(response.url)) != self.origin:
            # A signed link that has expired; the Hub signs a fresh one when asked again.
            return DroppedError(f"the link it gave answers {status}", status=status)
        return refusal(status, response.headers, request, self.credentials)

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


def _listed(entries: Iterable[Any]) -> tuple[HubFile, ...]:
    """Return the files that a call lists; folders and links of git are none."""
    rows: list[tuple[Any, ...]] = []
    for entry in entries:
        if hasattr(entry, "blob_id"):
            sha256, nbytes = None, entry.size
            if entry.lfs:  # two sizes that differ are none
                sha256 = entry.lfs.sha256
                nbytes = nbytes if entry.lfs.size == nbytes else [nbytes, entry.lfs.size]
            rows.append((entry.path, nbytes, entry.blob_id, sha256))
    return files_in(rows)


def checked(repo: str) -> str:
    """Return the name of a repository, or an owner, if it is one."""
    if not is_repository(repo):
        raise HubError(
            f"`{repo}` is no name of a repository", hint="a name on the Hub looks like `org/name`"
        )
    return repo
