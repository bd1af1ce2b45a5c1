"""One answer over HTTP: bounded in time, counted, with the token for the Hub itself and no other.

The token is added below everything else, to requests for the endpoint's own scheme, host and
port; code that builds a request never has it at hand. Redirects are followed by hand: those of a
question must stay on the Hub, those of a file may leave it and then travel without the token.
Every connection, read and write has a timeout, which the library's own client leaves out.
Proxies and certificates are taken from the environment, as everywhere in Python; cookies are
neither kept nor sent, and the response to every failure is one of ours.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any
from urllib.parse import urlencode

import httpx2

from qaudit.errors import HubError
from qaudit.hub.addresses import Origin, checked_endpoint, http_client, joined, origin_of
from qaudit.hub.entries import DroppedError
from qaudit.hub.patience import asked_wait_seconds
from qaudit.hub.refusals import Asked, Caller, refusal

_MOST_HOPS = 6
_REDIRECTS, _REDIRECTS_OF_A_BODY = (301, 302, 303, 307, 308), (307, 308)
_LARGEST_ANSWER_NBYTES = 64 << 20
_LONGEST_DRAIN_NBYTES = 1 << 16
_TOLD = ("x-repo-commit", "x-linked-etag", "etag", "x-linked-size")


@dataclass(frozen=True)
class Sent:
    """What goes along with a request, and which statuses are an answer to it."""

    method: str = "GET"
    body: bytes | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    answers: frozenset[int] = frozenset({200, 206})

    @classmethod
    def form(cls, values: Mapping[str, str]) -> Sent:
        """Send a question as a form."""
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        return cls("POST", urlencode(values).encode(), kind)

    @property
    def redirects(self) -> tuple[int, ...]:
        """What may send the request on: a body goes along with some redirects only."""
        return _REDIRECTS if self.body is None else _REDIRECTS_OF_A_BODY


NOTHING = Sent()


class Answer:
    """An open response, and what the Hub said of it on the way."""

    def __init__(
        self, response: httpx2.Response, told: Mapping[str, str], garbled: Callable[[str], HubError]
    ) -> None:
        """Keep the headers seen on the way; `garbled` makes the error if it makes no sense."""
        self._response, self.told, self.garbled = response, told, garbled
        self.status, self.headers = response.status_code, response.headers

    def following(self, url: str) -> str:
        """Return where the next page lies, or nothing if this is the last."""
        following = self._response.links.get("next", {}).get("url")
        return (joined(url, following) or "nowhere:") if following else ""

    def pieces(self, *, decoded: bool = False) -> Iterator[bytes]:
        """Yield the body as it comes, and `DroppedError` where it breaks off."""
        body = self._response.iter_bytes() if decoded else self._response.iter_raw()
        try:
            yield from body
        except httpx2.HTTPError as error:
            raise _dropped(error) from error


class Wire:
    """The connections to one Hub; may be used by several threads."""

    def __init__(self, caller: Caller, timeout_seconds: float) -> None:
        """Connect to nothing yet."""
        self.origin = checked_endpoint(caller.endpoint)
        self.requests = 0
        self._caller, self._timeout_seconds = caller, timeout_seconds
        self._counting = Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._http = http_client(_TokenForOneOrigin(self.origin, caller), timeout_seconds)
        self.close: Callable[[], object] = weakref.finalize(self, self._http.close)

    @property
    def logged_in(self) -> bool:
        """Say whether there is a token."""
        return self._caller.token is not None

    def cleaned(self, text: str) -> str:
        """Return a server's own words, fit to be shown."""
        return self._caller.cleaned(text)

    def break_off(self) -> None:
        """End whatever waits for the other side, in any thread: closing would not wake it."""
        with self._counting:
            opened = list(self._sockets)
        for connection in opened:
            with suppress(OSError):  # it has ended already
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def text(self, asked: Asked, url: str, sent: Sent = NOTHING) -> tuple[bytes, str]:
        """Return the whole body of an answer and the address of its next page, or nothing."""
        with self._followed(asked, url, sent) as answer:
            pieces, nbytes = [], 0
            end = time.monotonic() + 10 * self._timeout_seconds  # however slowly it drips
            for piece in answer.pieces(decoded=True):
                pieces.append(piece)
                nbytes += len(piece)
                if nbytes > _LARGEST_ANSWER_NBYTES:
                    raise answer.garbled("it is too long")
                if time.monotonic() > end:
                    raise DroppedError("it sends too slowly")
            following = answer.following(url)
            if following and origin_of(following) != self.origin:
                raise answer.garbled("its next page is on another server")
            return b"".join(pieces), following

    @contextmanager
    def body(self, asked: Asked, url: str, headers: Mapping[str, str]) -> Generator[Answer]:
        """Open the bytes of a file, wherever the Hub says they lie."""
        # Hashes are of the bytes as they are kept, so no encoding is asked for.
        plain = {"Accept-Encoding": "identity", **headers}
        with self._followed(asked, url, Sent(headers=plain), elsewhere=True) as answer:
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise answer.garbled("it comes in an encoding that was not requested")
            yield answer

    def garbled(self, asked: Asked, why: str) -> HubError:
        """Make the error for an answer that is none."""
        return HubError(
            f"the answer of `{self._caller.endpoint}` about {asked.call} makes no sense: {why}",
            hint="see whether `HF_ENDPOINT` is a Hub, and whether a proxy is in between",
        )

    # ------------------------------------------------------------------------------ one request

    @contextmanager
    def _followed(
        self, asked: Asked, url: str, sent: Sent, *, elsewhere: bool = False
    ) -> Generator[Answer]:
        """Open the answer at the end of the redirects; only files may lie `elsewhere`."""
        told: dict[str, str] = {}
        for _ in range(_MOST_HOPS):
            with self._opened(url, sent) as response:
                ours, heard = origin_of(url) == self.origin, response.headers
                if ours:
                    told |= {name: heard[name] for name in _TOLD if name in heard}
                location = heard.get("location")
                if response.status_code not in sent.redirects or not location:
                    self._must_be_fine(response, asked, sent, ours=ours)
                    yield Answer(response, told, partial(self.garbled, asked))
                    return
                _drain(response)
            url = self.address(asked, url, location, elsewhere=elsewhere)
        raise self.garbled(asked, "its redirects do not end")

    @contextmanager
    def _opened(self, url: str, sent: Sent) -> Generator[httpx2.Response]:
        with self._counting:
            self.requests += 1
        try:
            request = self._http.build_request(
                sent.method, url, headers=dict(sent.headers), content=sent.body
            )
            request.extensions["trace"] = self._connected
            response = self._http.send(request, stream=True, follow_redirects=False)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _dropped(error) from error
        try:
            yield response
        finally:
            response.close()

    def _connected(self, event: str, told: Mapping[str, Any]) -> None:
        """Take note of every connection that is made: the library tells of them as they come."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            with self._counting:
                self._sockets.add(told["return_value"].get_extra_info("socket"))

    def address(self, asked: Asked, url: str, location: str, *, elsewhere: bool) -> str:
        """Return where the Hub leads to from an address, if it may lead there."""
        following = joined(url, location)
        scheme, host, _ = found = origin_of(following)
        plainer = self.origin[0] == "https" and scheme == "http"
        if not host or scheme not in ("http", "https") or plainer:
            raise self.garbled(asked, "it redirects to an address that cannot be trusted")
        if found != self.origin and not elsewhere:
            raise HubError(
                f"`{self._caller.endpoint}` redirects to `{scheme}://{host}` "
                f"when asked for {asked.call}",
                hint="set `HF_ENDPOINT` to the address it redirects to, if you trust that one",
            )
        return following

    def _must_be_fine(
        self, response: httpx2.Response, asked: Asked, sent: Sent, *, ours: bool
    ) -> None:
        status, headers = response.status_code, response.headers
        if status in sent.answers:
            return
        if status in (408, 429) or status >= 500:
            wait = asked_wait_seconds(status, headers, time.time())
            raise DroppedError(f"it answers {status}", wait, status=status)
        if status == 416:
            raise self.garbled(asked, "it has fewer bytes than it listed")
        if not ours:  # a signed link that has expired; the Hub signs a fresh one when asked again
            raise DroppedError(f"the link it gave answers {status}", status=status)
        raise refusal(status, headers, asked, self._caller)


class _TokenForOneOrigin(httpx2.Auth):
    """The token, for requests to the Hub itself."""

    def __init__(self, origin: Origin, caller: Caller) -> None:
        self._origin, self._caller = origin, caller

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response]:
        """Add it, or make sure that it is not there."""
        request.headers.pop("Authorization", None)
        if self._caller.token and origin_of(str(request.url)) == self._origin:
            request.headers["Authorization"] = f"Bearer {self._caller.token}"
        yield request


def _drain(response: httpx2.Response) -> None:
    """Read the few words of a redirect, so that its connection serves again."""
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:18]) <= _LONGEST_DRAIN_NBYTES:
        try:
            response.read()
        except httpx2.HTTPError as error:
            raise _dropped(error) from error


def _dropped(error: Exception) -> DroppedError:
    """Say in plain words how a connection failed."""
    if isinstance(error, httpx2.ConnectTimeout | httpx2.PoolTimeout):
        return DroppedError("no connection in time", unreached=True)
    if isinstance(error, httpx2.ConnectError | httpx2.ProxyError):
        reason = " ".join(str(error).split()) or "refused"
        return DroppedError(f"no connection ({reason})", unreached=True)
    if isinstance(error, httpx2.TimeoutException):
        return DroppedError("it fell silent")
    if isinstance(error, httpx2.DecodingError):
        return DroppedError("it sent a damaged encoding")
    return DroppedError("the connection broke")
