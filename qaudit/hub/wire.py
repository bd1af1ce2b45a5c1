"""Requests over HTTP: bounded in time, counted, with the token for the Hub itself and no other.

The token is added below everything else, to requests for the endpoint's own scheme, host and
port; code that builds a request never has it at hand. Redirects are followed by hand: those of a
question must stay on the Hub, those of a file may leave it and then travel without the token.
Every connection, read and write has a timeout, which the library's own client leaves out.
Cookies are neither kept nor sent.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any
from urllib.parse import urlencode, urljoin

import httpx2

from qaudit.errors import HubError
from qaudit.hub.bodies import Answer, dropped_by
from qaudit.hub.environment import Origin, endpoint_origin, http_client, origin_of
from qaudit.hub.failures import Credentials, DroppedError, Request, refusal, requested_wait_seconds

_MOST_HOPS = 6
_REDIRECTS, _REDIRECTS_OF_A_BODY = (301, 302, 303, 307, 308), (307, 308)
_LARGEST_ANSWER_NBYTES = 64 << 20
_LONGEST_DRAIN_NBYTES = 1 << 16
_HUB_HEADERS = ("x-repo-commit", "x-linked-etag", "etag", "x-linked-size")


@dataclass(frozen=True)
class Payload:
    """Method, body and headers of a request, and the statuses that are no refusal of it."""

    method: str = "GET"
    body: bytes | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    statuses: frozenset[int] = frozenset({200, 206})

    @classmethod
    def form(cls, values: Mapping[str, str]) -> Payload:
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        return cls("POST", urlencode(values).encode(), kind)

    @property
    def redirects(self) -> tuple[int, ...]:
        return _REDIRECTS if self.body is None else _REDIRECTS_OF_A_BODY


GET = Payload()


class Wire:
    """The connections to one Hub; may be used by several threads."""

    def __init__(self, credentials: Credentials, timeout_seconds: float) -> None:
        self.origin = endpoint_origin(credentials.endpoint)
        self.credentials = credentials
        self.requests = 0  # redirects and repetitions too
        self._timeout_seconds = timeout_seconds
        self._counting = Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._http = http_client(_TokenForOneOrigin(self.origin, credentials), timeout_seconds)
        self.close: Callable[[], object] = weakref.finalize(self, self._http.close)

    def break_off(self) -> None:
        """End every request of every thread that waits; closing the client would not wake it."""
        with self._counting:
            opened = list(self._sockets)
        for connection in opened:
            with suppress(OSError):  # it has ended already
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def text(self, request: Request, url: str, payload: Payload = GET) -> tuple[bytes, str]:
        """Return the whole body of a response and the address of its next page, or nothing."""
        with self._followed(request, url, payload) as answer:
            pieces, nbytes = [], 0
            end = time.monotonic() + 10 * self._timeout_seconds  # however slowly it drips
            for piece in answer.pieces(decoded=True):
                pieces.append(piece)
                nbytes += len(piece)
                if nbytes > _LARGEST_ANSWER_NBYTES:
                    raise answer.garbled("it is too long")
                if time.monotonic() > end:
                    raise DroppedError("it sends too slowly")
            following = answer.next_page()
            if following and origin_of(following := _joined(url, following)) != self.origin:
                raise answer.garbled("its next page is on another server")
            return b"".join(pieces), following or ""

    @contextmanager
    def body(self, request: Request, url: str, headers: Mapping[str, str]) -> Generator[Answer]:
        """Open the bytes of a file, on whichever server the Hub keeps them."""
        # Hashes are of the bytes as they are stored, so no encoding is requested.
        plain = {"Accept-Encoding": "identity", **headers}
        with self._followed(request, url, Payload(headers=plain), elsewhere=True) as answer:
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise answer.garbled("it comes in an encoding that was not requested")
            yield answer

    def garbled(self, request: Request, why: str) -> HubError:
        return HubError(
            f"the answer of `{self.credentials.endpoint}` about {request.call} "
            f"makes no sense: {why}",
            hint="see whether `HF_ENDPOINT` is a Hub, and whether a proxy is in between",
        )

    def address(self, request: Request, url: str, location: str, *, elsewhere: bool) -> str:
        """Return where a redirect or a link leads, if the Hub may lead there."""
        following = _joined(url, location)
        scheme, host, _ = origin = origin_of(following)
        downgrade = self.origin[0] == "https" and scheme == "http"
        if not host or scheme not in ("http", "https") or downgrade:
            raise self.garbled(request, "it redirects to an address that cannot be trusted")
        if origin != self.origin and not elsewhere:
            raise HubError(
                f"`{self.credentials.endpoint}` redirects to `{scheme}://{host}` "
                f"when asked for {request.call}",
                hint="set `HF_ENDPOINT` to the address it redirects to, if you trust that one",
            )
        return following

    @contextmanager
    def _followed(
        self, request: Request, url: str, payload: Payload, *, elsewhere: bool = False
    ) -> Generator[Answer]:
        """Open the response at the end of the redirects; only files may be `elsewhere`."""
        hub_headers: dict[str, str] = {}
        for _ in range(_MOST_HOPS):
            with self._opened(url, payload) as response:
                headers = response.headers
                if origin_of(url) == self.origin:
                    hub_headers |= {name: headers[name] for name in _HUB_HEADERS if name in headers}
                location = headers.get("location")
                if response.status_code not in payload.redirects or not location:
                    if response.status_code not in payload.statuses:
                        raise self.failure(response, request)
                    yield Answer(response, hub_headers, partial(self.garbled, request))
                    return
                _drain(response)
            url = self.address(request, url, location, elsewhere=elsewhere)
        raise self.garbled(request, "its redirects do not end")

    @contextmanager
    def _opened(self, url: str, payload: Payload) -> Generator[httpx2.Response]:
        with self._counting:
            self.requests += 1
        try:
            outgoing = self._http.build_request(
                payload.method, url, headers=dict(payload.headers), content=payload.body
            )
            outgoing.extensions["trace"] = self._note_connection
            response = self._http.send(outgoing, stream=True, follow_redirects=False)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise dropped_by(error) from error
        try:
            yield response
        finally:
            response.close()

    def _note_connection(self, event: str, values: Mapping[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            with self._counting:
                self._sockets.add(values["return_value"].get_extra_info("socket"))

    def failure(self, response: httpx2.Response, request: Request) -> DroppedError | HubError:
        """Return what the status of a response means: to be asked again, or a refusal."""
        status, headers = response.status_code, response.headers
        if status in (408, 429) or status >= 500:
            wait = requested_wait_seconds(status, headers, time.time())
            return DroppedError(f"it answers {status}", wait, status=status)
        if status == 416:
            return self.garbled(request, "it has fewer bytes than it listed")
        if origin_of(str(response.url)) != self.origin:  # a signed link that has expired
            return DroppedError(f"the link it gave answers {status}", status=status)
        return refusal(status, headers, request, self.credentials)


class _TokenForOneOrigin(httpx2.Auth):
    def __init__(self, origin: Origin, credentials: Credentials) -> None:
        self._origin, self._credentials = origin, credentials

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response]:
        request.headers.pop("Authorization", None)
        if self._credentials.token and origin_of(str(request.url)) == self._origin:
            request.headers["Authorization"] = f"Bearer {self._credentials.token}"
        yield request


def _joined(url: str, location: str) -> str:
    """Return where a location leads from an address; an address without a host if that is bad."""
    try:
        return urljoin(url, location) or "nowhere:"
    except ValueError:
        return "nowhere:"


def _drain(response: httpx2.Response) -> None:
    """Read the few words of a redirect, so that its connection serves again."""
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:18]) <= _LONGEST_DRAIN_NBYTES:
        try:
            response.read()
        except httpx2.HTTPError as error:
            raise dropped_by(error) from error
