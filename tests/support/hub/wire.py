"""What is asked and answered, the faults that a test injects, and the sockets under them.

A fault is a dictionary in `Hub.faults`; the first whose `match` is found in `METHOD /path` or
`METHOD /path?query` applies, `times` times (without it, always), after the first `skip` matches.

    status, headers, body   answer that; without a status or body, `headers` replace those of the
                            true answer (None drops one): a wrong X-Repo-Commit, X-Linked-ETag ...
    body                    alone: status 200 with that body; text, or a value that becomes JSON
    silent                  no answer at all
    until                   a threading.Event: answer once it is set
    cut, reset, stall       after so many bytes of the body: close, TCP reset, say nothing more
    short                   announce and send only so many bytes
    flip                    this byte of the body is wrong, the size is right
    norange                 a request for a range gets everything, with 200
    expired                 this signed link of the CDN, and no fresh one, answers 403 from now on
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs


@dataclass(frozen=True)
class Request:
    """What a client asked for."""

    method: str
    path: str  # as it came: `refs%2Fpr%2F1` must stay one segment
    query_text: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    at_cdn: bool
    fault: Mapping[str, Any] = field(default_factory=dict)

    @property
    def query(self):
        found = parse_qs(self.query_text, keep_blank_values=True)
        return {name: values[-1] for name, values in found.items()}

    @property
    def json(self):
        return json.loads(self.body or b"{}")

    def flag(self, name):
        """Say whether a parameter of the query is on."""
        return self.query.get(name, "").lower() in ("1", "true")


@dataclass(frozen=True)
class Reply:
    """What the server answers; a header that is None is left out."""

    status: int = 200
    body: bytes | Iterable[bytes] = b""
    headers: dict = field(default_factory=dict)


class RefusedError(Exception):
    """Raised with a reply by whatever finds that the request cannot be granted."""


def as_json(value, status=200, headers=None):
    """Return an answer of JSON."""
    kind = {"Content-Type": "application/json; charset=utf-8"}
    return Reply(status, json.dumps(value).encode(), kind | dict(headers or {}))


def refusal(status, message, code=None):
    """Return an error in the Hub's shape: the message twice, and a code the client understands."""
    named = {"X-Error-Message": message, "X-Error-Code": code}
    return RefusedError(as_json({"error": message}, status, named))


@dataclass(frozen=True)
class Place:
    """The words that a route found in an address."""

    kind: str = "model"
    owner: str = ""
    name: str = ""
    revision: str = "main"
    path: str = ""
    number: str = ""

    @property
    def repo(self):
        """The repo's key in `Hub.repos`."""
        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"{prefix}{self.owner}/{self.name}"


FAULTS = {"match", "times", "skip", "status", "headers", "body", "silent", "until", "norange",
          "expired", "cut", "reset", "stall", "short", "flip"}  # fmt: skip
POLL_SECONDS = 0.005
FOR_EVER_SECONDS = 86400


def take(faults, request):
    """Return the fault that applies to a request, counted as used, or nothing."""
    asked = f"{request.method} {request.path}"
    for fault in list(faults):
        assert set(fault) <= FAULTS, fault
        found = any(re.search(fault["match"], t) for t in (asked, f"{asked}?{request.query_text}"))
        if found and fault.get("times", 1) > 0:
            if fault.get("skip", 0) > 0:
                fault["skip"] -= 1
                continue
            if "times" in fault:
                fault["times"] -= 1
            return fault
    return {}


def injected(fault):
    """Return the answer that a fault gives instead of the true one."""
    if "status" not in fault and "body" not in fault:
        return None
    body = fault.get("body", {"error": "injected fault"})
    data = body.encode() if isinstance(body, str) else body
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    return replace(as_json(None, fault.get("status", 200)), body=data)


async def hold(fault):
    """Wait as long as a fault says before the answer, for ever if it is to be silent."""
    if fault.get("silent"):
        await asyncio.sleep(FOR_EVER_SECONDS)
    while "until" in fault and not fault["until"].is_set():
        await asyncio.sleep(POLL_SECONDS)


def reset(send):
    """Break the connection so that the client sees a reset instead of a clean close."""
    transport = send.__self__.transport  # type: ignore[attr-defined]  # uvicorn's, below ASGI
    now = struct.pack("ii", 1, 0)  # linger for no time at all: RST
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
    transport.abort()


async def deliver(send, request, reply, entry):
    """Send an answer as the request's fault would have it, and count what went out."""
    entry["status"] = reply.status
    headers = {**reply.headers}
    if isinstance(reply.body, bytes):
        headers.setdefault("Content-Length", len(reply.body))
    given = ((k, v) for k, v in headers.items() if v is not None)
    lines = [(k.lower().encode(), str(v).encode("latin-1")) for k, v in given]
    await send({"type": "http.response.start", "status": reply.status, "headers": lines})
    if request.method != "HEAD" and not await _send_body(send, request.fault, reply.body, entry):
        return  # uvicorn closes a connection on which an answer was left unfinished
    await send({"type": "http.response.body", "body": b""})


async def _send_body(send, fault, body, entry):
    """Send a body; say whether it came to its end."""
    pieces = ([body] if body else []) if isinstance(body, bytes) else body
    stop = min([fault[key] for key in ("cut", "reset", "stall") if key in fault], default=None)
    for piece in _spoilt(pieces, fault.get("flip"), stop):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)  # others are served meanwhile, and a client that left is noticed
        if send.__self__.disconnected:  # type: ignore[attr-defined]  # uvicorn's own
            return False
        entry["sent"] += len(piece)
    if not pieces or stop is None or entry["sent"] < stop:
        return True
    if "stall" in fault:
        await asyncio.sleep(FOR_EVER_SECONDS)
    if "reset" in fault:
        await _sent(send)
        reset(send)
    return False


def _spoilt(pieces, flip, stop):
    """Yield the pieces up to `stop` with one byte flipped."""
    sent = 0
    for piece in pieces:
        if flip is not None and sent <= flip < sent + len(piece):
            at = flip - sent
            piece = piece[:at] + bytes([piece[at] ^ 0xFF]) + piece[at + 1 :]
        if stop is not None:
            piece = piece[: stop - sent]
        if piece:
            yield piece
        sent += len(piece)
        if sent == stop:
            return


async def _sent(send):
    """Wait until what was sent has left; a reset would throw it away."""
    transport = send.__self__.transport  # type: ignore[attr-defined]
    while transport.get_write_buffer_size() and not transport.is_closing():
        await asyncio.sleep(POLL_SECONDS)
    await asyncio.sleep(0.05)  # what the client has not read is lost by a reset, too


class Service:
    """Serves an ASGI application on some sockets from a thread until it is stopped."""

    def __init__(self, application, sockets):
        from uvicorn import Config

        self._sockets = sockets
        self._config = Config(
            application,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            log_config=None,
            log_level="critical",
            access_log=False,
        )
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="local Hub")
        self._thread.start()
        self._ready.wait()

    def stop(self):
        """Break every connection and return when nothing of the service is left."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self):
        try:
            asyncio.run(self._serve())
        finally:
            self._ready.set()  # should it have failed, nobody waits for ever

    async def _serve(self):
        from uvicorn.protocols.http.h11_impl import H11Protocol
        from uvicorn.server import ServerState

        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        state = ServerState()
        servers = [
            await self._loop.create_server(lambda: H11Protocol(self._config, state, {}), sock=sock)
            for sock in self._sockets
        ]
        self._ready.set()
        await self._stopping.wait()
        for server in servers:
            server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


def bound(port):
    """Return a socket that holds a port; connections are refused until somebody listens."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held
