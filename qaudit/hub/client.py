"""What is asked of the Hub: names, commits, trees, and the bytes of files.

`huggingface_hub` gives the token from the standard places and the address of a file. `HfApi` is
not used, for reasons that version 2.4 still gives. It sends every call through one session per
process: a `set_client_factory` of ours would replace the session of a notebook that imports this
package, and two Hubs could not be open at once. Over such a factory retries, timeouts and the
token could be held to our rules, and answers would still have to be checked, because names
become paths. Uploads by `create_commit` go through `hf_xet`, whose connections no factory reaches,
and a file that `.gitignore` names is left out with a warning where a refusal is needed.

Questions are repeated where that may help, a bounded number of times and visibly; then the Hub
counts as unreachable. A download is one attempt, because only the writer of the file knows what
came. Before a byte is used, the commit that answers must be the one requested, and the blob
offered the one that was listed.
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
    commit_in,
    files_in,
    is_repository,
    repositories_in,
    revisions_in,
)
from qaudit.hub.bodies import must_be_offered, part_of, rest_of, skipped
from qaudit.hub.entries import RESUME, DroppedError, HubFile, Kind, Revision
from qaudit.hub.environment import settings_of_the_environment
from qaudit.hub.patience import next_wait_seconds, wait_in_words
from qaudit.hub.refusals import Asked, Caller, no_file, not_known_offline
from qaudit.hub.wire import NOTHING, Answer, Sent, Wire

T = TypeVar("T")
_MOST_PAGES = 200
_MOST_READ_NBYTES = 101_000_000  # more than the longest header, less than a file of weights


def _in_silence(text: str) -> None:
    """Say nothing."""


def _not_at_all(seconds: float) -> None:
    """Do not wait."""


class Client:
    """One Hub, and who asks it; may be used by several threads."""

    def __init__(
        self,
        endpoint: str,
        *,
        token: str | None = None,
        offline: bool = False,
        pause: Callable[[float], object] | None = None,
        say: Callable[[str], object] = _in_silence,
        timeout_seconds: float = 30.0,
    ) -> None:
        """Connect to nothing yet; without a `pause` of its own, `break_off` ends a wait."""
        self.endpoint = endpoint.rstrip("/")
        self.offline = offline
        self.say = say
        self.calls = 0  # questions, however often each had to be asked
        self._has_token = bool(token)
        self.wire = Wire(Caller(self.endpoint, token or None), timeout_seconds)
        self._stopped, self._counting = Event(), Lock()
        self.pause = pause or self._stopped.wait

    @classmethod
    def from_environment(
        cls, *, say: Callable[[str], object] = _in_silence, patient: bool = True
    ) -> Client:
        """Read where the Hub is, who we are, and whether it may be asked at all.

        Who is not patient does not wait between attempts, and for each five seconds at most.
        """
        found = settings_of_the_environment()
        return cls(
            found.endpoint,
            token=found.token,
            offline=found.offline,
            say=say,
            pause=None if patient else _not_at_all,
            timeout_seconds=found.timeout_seconds if patient else 5.0,
        )

    @property
    def has_token(self) -> bool:
        """Return whether there is a token; the token itself stays with the connection."""
        return self._has_token

    @property
    def logged_in(self) -> bool:
        """Say whether requests carry a token."""
        return self.wire.logged_in

    @property
    def requests(self) -> int:
        """Count everything that was sent, redirects and repetitions too."""
        return self.wire.requests

    def close(self) -> None:
        """Close the connections; what is no longer referred to closes itself."""
        self.wire.close()

    def break_off(self) -> None:
        """End every transfer and every wait, in whichever thread; nothing is asked any more."""
        self._stopped.set()
        self.wire.break_off()

    # -------------------------------------------------------------------------------- questions

    def revisions(self, repo: str, kind: Kind = "model") -> tuple[Revision, ...]:
        """Return the branches and tags of a repository."""
        asked = Asked(f"the revisions of `{repo}`", checked(repo), kind)
        return self.believed(asked, revisions_in, self.ask(asked, f"{self.api(asked)}/refs")[0])

    def commit(self, repo: str, revision: str = "main", kind: Kind = "model") -> str:
        """Return the full commit that a branch, a tag, a pull request or a short id stands for."""
        call = f"the commit of `{revision}` in `{repo}`"
        asked = Asked(call, checked(repo), kind, revision)
        url = f"{self.api(asked)}/revision/{quote(revision, safe='')}"
        return self.believed(asked, commit_in, self.ask(asked, url)[0])

    def files(self, repo: str, commit: str, *, kind: Kind = "model") -> tuple[HubFile, ...]:
        """Return every file at a commit, in all folders."""
        asked = Asked(f"the files of `{repo}` at `{commit}`", checked(repo), kind, commit)
        url = f"{self.api(asked)}/tree/{quote(commit, safe='')}?recursive=true&expand=false"
        return self.believed(asked, files_in, self._pages(asked, url))

    def file(self, repo: str, commit: str, path: str, *, kind: Kind = "model") -> HubFile:
        """Return one file at a commit."""
        asked = Asked(f"`{path}` of `{repo}`", checked(repo), kind, commit, path)
        url = f"{self.api(asked)}/paths-info/{quote(commit, safe='')}"
        answer, _ = self.ask(asked, url, Sent.form({"paths": path, "expand": "false"}))
        found = self.believed(asked, files_in, [answer])
        if not found:
            raise no_file(asked)
        if [file.path for file in found] != [path]:
            raise self.wire.garbled(asked, "it is about other files")
        return found[0]

    def neighbours(
        self, repo: str, commit: str, folder: str, *, kind: Kind = "model"
    ) -> tuple[str, ...]:
        """Return the names of files in one folder, as many as one page tells."""
        asked = Asked(f"the files of `{repo}` in `{folder}`", checked(repo), kind, commit)
        below = f"/{quote(folder)}" if folder else ""
        url = f"{self.api(asked)}/tree/{quote(commit, safe='')}{below}?recursive=false"
        answer, _ = self.ask(asked, url)
        found = self.believed(asked, files_in, [answer])
        return tuple(file.path.rpartition("/")[2] for file in found)

    def repositories(self, pattern: str) -> tuple[str, ...]:
        """Return the repositories of one owner whose names match `owner/name-*`."""
        owner, _, name = pattern.partition("/")
        asked = Asked(f"the repositories `{pattern}`", checked(owner))
        begins = re.split(r"[*?\[]", name)[0]
        query = {"author": owner, "limit": "1000"} | ({"search": begins} if begins else {})
        pages = self._pages(asked, f"{self.endpoint}/api/models?{urlencode(query)}")
        found = self.believed(asked, repositories_in, pages)
        return tuple(sorted({repo for repo in found if fnmatchcase(repo, pattern)}))

    # ------------------------------------------------------------------------------------ bytes

    def read(  # noqa: PLR0913
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
        asked = Asked(f"a part of `{path}` of `{repo}`", checked(repo), kind, commit, path)
        self.must_be_online(asked)
        if not 0 <= start < stop <= start + _MOST_READ_NBYTES:
            raise ValueError(f"bytes {start} to {stop}")

        def attempt() -> bytes:
            with self._offered(asked, {"Range": f"bytes={start}-{stop - 1}"}, blob) as answer:
                skip = skipped(answer, start, stop)
                if skip > _MOST_READ_NBYTES:
                    raise answer.garbled("it does not serve parts of files")
                return part_of(answer, skip, stop - start)

        return self.patiently(asked, attempt)

    @contextmanager
    def download(
        self, repo: str, commit: str, file: HubFile, start: int, *, kind: Kind = "model"
    ) -> Generator[Iterator[bytes]]:
        """Stream a file from byte `start` in one attempt; `DroppedError` asks for another."""
        asked = Asked(f"`{file.path}` of `{repo}`", checked(repo), kind, commit, file.path)
        self.must_be_online(asked)
        if not 0 <= start <= file.nbytes:
            raise ValueError(f"byte {start} of {file.nbytes}")
        if start and start == file.nbytes:
            yield iter(())
            return
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._offered(asked, headers, file.blob) as answer:
            if answer.told.get("x-linked-size", str(file.nbytes)) != str(file.nbytes):
                raise answer.garbled("it offers another size than it listed")
            skip = skipped(answer, start, file.nbytes)
            yield rest_of(answer, skip, file.nbytes - start)

    @contextmanager
    def _offered(
        self, asked: Asked, headers: Mapping[str, str], blob: str | None
    ) -> Generator[Answer]:
        """Open the bytes of a file once the Hub has said that they are those asked for."""
        from huggingface_hub import hf_hub_url  # not before its variables were checked

        url = hf_hub_url(
            asked.repo, asked.path or "", repo_type=asked.kind, revision=asked.revision,
            endpoint=self.endpoint,
        )  # fmt: skip
        with self.wire.body(asked, url, headers) as answer:
            must_be_offered(asked, answer.told, blob)
            yield answer

    # ---------------------------------------------------------------------------------- answers

    def api(self, asked: Asked) -> str:
        """Return the address under which a repository is asked about."""
        return f"{self.endpoint}/api/{asked.kind}s/{asked.repo}"

    def believed(self, asked: Asked, read: Callable[[Any], T], answer: Any) -> T:
        """Read an answer, and say what it was about if it makes no sense."""
        try:
            return read(answer)
        except GarbledError as error:
            raise self.wire.garbled(asked, str(error)) from error

    def _pages(self, asked: Asked, url: str) -> list[Any]:
        """Return all pages of an answer, of which there cannot be any number."""
        pages: list[Any] = []
        seen: set[str] = set()
        while url:
            if url in seen or len(pages) == _MOST_PAGES:
                raise self.wire.garbled(asked, "its pages do not end")
            seen.add(url)
            page, url = self.ask(asked, url)
            pages.append(page)
        return pages

    def ask(self, asked: Asked, url: str, sent: Sent = NOTHING) -> tuple[Any, str]:
        """Return the JSON of an answer and the address of its next page, if there is one."""
        self.must_be_online(asked)
        with self._counting:
            self.calls += 1
        text, following = self.patiently(asked, lambda: self.wire.text(asked, url, sent))
        try:
            return json.loads(text), following
        except (ValueError, RecursionError) as error:
            raise self.wire.garbled(asked, "it is not JSON") from error

    def patiently(self, asked: Asked, attempt: Callable[[], T]) -> T:
        """Try again where that may help: a bounded number of times, and saying so."""
        failures = 0
        while not self._stopped.is_set():
            try:
                return attempt()
            except DroppedError as dropped:
                failures += 1
                wait = next_wait_seconds(dropped, failures, asked.call, self.endpoint)
                if not self._stopped.is_set():
                    self.say(wait_in_words(dropped, wait, asked.call))
                    self.pause(wait)
        raise Interrupted(f"stopped while asking for {asked.call}", hint=RESUME)

    def must_be_online(self, asked: Asked) -> None:
        """Refuse to ask where the environment forbids it."""
        if self.offline:
            raise not_known_offline(asked)


def checked(repo: str) -> str:
    """Return the name of a repository, or an owner, if it is one."""
    if not is_repository(repo):
        raise HubError(
            f"`{repo}` is no name of a repository", hint="a name on the Hub looks like `org/name`"
        )
    return repo
