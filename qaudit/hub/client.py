"""The Hub's API: names, commits, trees, and the bytes of files.

`huggingface_hub` gives the token from the standard places and the address of a file. `HfApi` is
not used, for reasons that version 2.4 still gives. It sends every call through one session per
process: a `set_client_factory` of ours would replace the session of a notebook that imports this
package, and two Hubs could not be open at once. Over such a factory retries, timeouts and the
token could be held to our rules, and answers would still have to be checked, because names
become paths. Uploads by `create_commit` go through `hf_xet`, whose connections no factory reaches,
with no way back to plain HTTP; handed over as a stream, a file goes by HTTP, and the token goes to
whichever host the link to confirm it names. A file that `.gitignore` names is left out of the pull
request without an error, where a refusal is needed.

A request is repeated where that may help, a bounded number of times and visibly; then the Hub
counts as unreachable. A download is one attempt, because only the writer of the file knows how
far it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from threading import Event, Lock
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from qaudit.errors import HubError, Interrupted
from qaudit.hub.answers import (
    GarbledError,
    HubFile,
    Kind,
    Revision,
    commit_in,
    files_in,
    is_repository,
    repositories_in,
    revisions_in,
)
from qaudit.hub.bodies import Answer, check_offer, nbytes_before, part_of, rest_of
from qaudit.hub.environment import environment_settings
from qaudit.hub.failures import (
    RESUME,
    Credentials,
    DroppedError,
    Request,
    next_wait_seconds,
    no_file,
    not_known_offline,
    wait_in_words,
)
from qaudit.hub.wire import GET, Payload, Wire

T = TypeVar("T")
Say = Callable[[str], object]
"""Shows a message: a retry, a wait."""

_MOST_PAGES = 200
_MOST_READ_NBYTES = 101_000_000  # more than the longest header, less than a file of weights


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
        self.logged_in = bool(token)
        self.wire = Wire(Credentials(self.endpoint, token or None), timeout_seconds)
        self._stopped, self._counting = Event(), Lock()
        self.pause = pause or self._stopped.wait

    @classmethod
    def from_environment(cls, *, say: Say = lambda text: None, patient: bool = True) -> Client:
        """Return the client of the environment's Hub; one that is not patient never waits long."""
        settings = environment_settings()
        return cls(
            settings.endpoint,
            token=settings.token,
            offline=settings.offline,
            say=say,
            pause=None if patient else lambda seconds: None,
            timeout_seconds=settings.timeout_seconds if patient else 5.0,
        )

    @property
    def requests(self) -> int:
        return self.wire.requests

    def close(self) -> None:
        self.wire.close()

    def break_off(self) -> None:
        """End every transfer and every wait of every thread, and send nothing any more."""
        self._stopped.set()
        self.wire.break_off()

    def revisions(self, repo: str, kind: Kind = "model") -> tuple[Revision, ...]:
        request = Request(f"the revisions of `{repo}`", checked(repo), kind)
        return self.parsed(request, revisions_in, self.ask(request, f"{self.api(request)}/refs")[0])

    def commit(self, repo: str, revision: str = "main", kind: Kind = "model") -> str:
        call = f"the commit of `{revision}` in `{repo}`"
        request = Request(call, checked(repo), kind, revision)
        url = f"{self.api(request)}/revision/{quote(revision, safe='')}"
        return self.parsed(request, commit_in, self.ask(request, url)[0])

    def files(self, repo: str, commit: str, *, kind: Kind = "model") -> tuple[HubFile, ...]:
        """Return every file at a commit, in all folders."""
        request = Request(f"the files of `{repo}` at `{commit}`", checked(repo), kind, commit)
        url = f"{self.api(request)}/tree/{quote(commit, safe='')}?recursive=true&expand=false"
        return self.parsed(request, files_in, self._pages(request, url))

    def file(self, repo: str, commit: str, path: str, *, kind: Kind = "model") -> HubFile:
        request = Request(f"`{path}` of `{repo}`", checked(repo), kind, commit, path)
        url = f"{self.api(request)}/paths-info/{quote(commit, safe='')}"
        answer, _ = self.ask(request, url, Payload.form({"paths": path, "expand": "false"}))
        files = self.parsed(request, files_in, [answer])
        if not files:
            raise no_file(request)
        if [file.path for file in files] != [path]:
            raise self.wire.garbled(request, "it is about other files")
        return files[0]

    def neighbours(
        self, repo: str, commit: str, folder: str, *, kind: Kind = "model"
    ) -> tuple[str, ...]:
        """Return the names of files in one folder, as many as are on one page."""
        request = Request(f"the files of `{repo}` in `{folder}`", checked(repo), kind, commit)
        below = f"/{quote(folder)}" if folder else ""
        url = f"{self.api(request)}/tree/{quote(commit, safe='')}{below}?recursive=false"
        files = self.parsed(request, files_in, [self.ask(request, url)[0]])
        return tuple(file.path.rpartition("/")[2] for file in files)

    def repositories(self, pattern: str) -> tuple[str, ...]:
        """Return the repositories of one owner whose names match `owner/name-*`."""
        owner, _, name = pattern.partition("/")
        request = Request(f"the repositories `{pattern}`", checked(owner))
        prefix = re.split(r"[*?\[]", name)[0]
        query = {"author": owner, "limit": "1000"} | ({"search": prefix} if prefix else {})
        pages = self._pages(request, f"{self.endpoint}/api/models?{urlencode(query)}")
        names = self.parsed(request, repositories_in, pages)
        return tuple(sorted({repo for repo in names if fnmatchcase(repo, pattern)}))

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
            with self._offered(request, {"Range": f"bytes={start}-{stop - 1}"}, blob) as answer:
                skip = nbytes_before(answer, start, stop)
                if skip > _MOST_READ_NBYTES:
                    raise answer.garbled("it does not serve parts of files")
                return part_of(answer, skip, stop - start)

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
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._offered(request, headers, file.blob) as answer:
            if answer.hub_headers.get("x-linked-size", str(file.nbytes)) != str(file.nbytes):
                raise answer.garbled("it offers another size than it listed")
            skip = nbytes_before(answer, start, file.nbytes)
            yield rest_of(answer, skip, file.nbytes - start)

    @contextmanager
    def _offered(
        self, request: Request, headers: Mapping[str, str], blob: str | None
    ) -> Generator[Answer]:
        from huggingface_hub import hf_hub_url  # not before its variables were checked

        url = hf_hub_url(
            request.repo, request.path or "", repo_type=request.kind, revision=request.revision,
            endpoint=self.endpoint,
        )  # fmt: skip
        with self.wire.body(request, url, headers) as answer:
            check_offer(request, answer.hub_headers, blob)
            yield answer

    def api(self, request: Request) -> str:
        return f"{self.endpoint}/api/{request.kind}s/{request.repo}"

    def parsed(self, request: Request, parse: Callable[[Any], T], answer: Any) -> T:
        """Parse an answer; an error names what the request was about."""
        try:
            return parse(answer)
        except GarbledError as error:
            raise self.wire.garbled(request, str(error)) from error

    def _pages(self, request: Request, url: str) -> list[Any]:
        pages: list[Any] = []
        seen: set[str] = set()
        while url:
            if url in seen or len(pages) == _MOST_PAGES:
                raise self.wire.garbled(request, "its pages do not end")
            seen.add(url)
            page, url = self.ask(request, url)
            pages.append(page)
        return pages

    def ask(self, request: Request, url: str, payload: Payload = GET) -> tuple[Any, str]:
        """Return the JSON of an answer and the address of its next page, if there is one."""
        self._require_online(request)
        with self._counting:
            self.calls += 1
        text, following = self.with_retries(request, lambda: self.wire.text(request, url, payload))
        try:
            return json.loads(text), following
        except (ValueError, RecursionError) as error:
            raise self.wire.garbled(request, "it is not JSON") from error

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
                    self.say(wait_in_words(dropped, wait, request.call))
                    self.pause(wait)
        raise Interrupted(f"stopped while asking for {request.call}", hint=RESUME)

    def _require_online(self, request: Request) -> None:
        if self.offline:
            raise not_known_offline(request)


def checked(repo: str) -> str:
    """Return the name of a repository, or an owner, if it is one."""
    if not is_repository(repo):
        raise HubError(
            f"`{repo}` is no name of a repository", hint="a name on the Hub looks like `org/name`"
        )
    return repo
