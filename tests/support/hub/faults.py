"""Faults that a test injects, and the wire under them.

A fault is a dictionary in `Hub.faults`; the first whose `match` is found in `METHOD /path` or
`METHOD /path?query` applies, `times` times (without it, always), after the first `skip` matches.

    status, headers, body   answer that; without a status or body, `headers` replace those of the
                            true answer (None drops one): a wrong X-Repo-Commit, X-Linked-ETag ...
    body                    alone: status 200 with that body; text, or a value that becomes JSON
    silent                  no answer at all
    until                   a threading.Event: answer once it is set
    delay                   seconds before the answer
    rate                    bytes a second
    cut, reset, stall       after so many bytes of the body: close, TCP reset, say nothing more
    stall_for               seconds after which a stall becomes a close
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
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from tests.support.hub.exchange import Reply, Request

Send = Callable[[dict[str, Any]], Awaitable[None]]

SELECTS = {"match", "times", "skip"}
ANSWERS = {"status", "headers", "body", "silent", "until", "delay", "norange", "expired"}
BODIES = {"rate", "cut", "reset", "stall", "stall_for", "short", "flip"}
POLL_SECONDS = 0.005
FOR_EVER_SECONDS = 86400


def take(faults: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Return the fault that applies to a request, counted as used, or nothing."""
    asked = f"{request.method} {request.path}"
    for fault in list(faults):
        if unknown := set(fault) - SELECTS - ANSWERS - BODIES:
            raise ValueError(f"unknown keys {sorted(unknown)} in fault {fault}")
        if fault.get("times", 1) <= 0:
            continue
        if not any(re.search(fault["match"], t) for t in (asked, f"{asked}?{request.query_text}")):
            continue
        if fault.get("skip", 0) > 0:
            fault["skip"] -= 1
            continue
        if "times" in fault:
            fault["times"] -= 1
        return fault
    return {}


def injected(fault: dict[str, Any]) -> Reply | None:
    """Return the answer that a fault gives instead of the true one."""
    if "status" not in fault and "body" not in fault:
        return None
    body = fault.get("body", {"error": "injected fault"})
    data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else None
    kind = {"Content-Type": "application/json; charset=utf-8"}
    headers = kind | fault.get("headers", {})
    return Reply(
        fault.get("status", 200), json.dumps(body).encode() if data is None else data, headers
    )


async def hold(fault: dict[str, Any]) -> None:
    """Wait as long as a fault says before the answer, for ever if it is to be silent."""
    if fault.get("silent"):
        await asyncio.sleep(FOR_EVER_SECONDS)
    while "until" in fault and not fault["until"].is_set():
        await asyncio.sleep(POLL_SECONDS)
    await asyncio.sleep(fault.get("delay", 0))


def reset(send: Send) -> None:
    """Break the connection so that the client sees a reset instead of a clean close."""
    transport = send.__self__.transport  # type: ignore[attr-defined]  # uvicorn's, below ASGI
    now = struct.pack("ii", 1, 0)  # linger for no time at all: RST
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
    transport.abort()


async def deliver(send: Send, request: Request, reply: Reply, entry: dict[str, Any]) -> None:
    """Send an answer as the request's fault would have it, and count what went out."""
    entry["status"] = reply.status
    headers = {**reply.headers}
    if isinstance(reply.body, bytes):
        headers.setdefault("Content-Length", len(reply.body))
    lines = [
        (k.lower().encode(), str(v).encode("latin-1")) for k, v in headers.items() if v is not None
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": lines})
    if request.method != "HEAD" and not await _send_body(send, request.fault, reply.body, entry):
        return  # uvicorn closes a connection on which an answer was left unfinished
    await send({"type": "http.response.body", "body": b""})


async def _send_body(
    send: Send, fault: Any, body: bytes | Iterable[bytes], entry: dict[str, Any]
) -> bool:
    """Send a body; say whether it came to its end."""
    pieces = ([body] if body else []) if isinstance(body, bytes) else body
    stop = min([fault[key] for key in ("cut", "reset", "stall") if key in fault], default=None)
    for piece in _spoilt(pieces, fault.get("flip"), stop):
        if "rate" in fault:
            await asyncio.sleep(len(piece) / fault["rate"])
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)  # others are served meanwhile, and a client that left is noticed
        if send.__self__.disconnected:  # type: ignore[attr-defined]  # uvicorn's own
            return False
        entry["sent"] += len(piece)
    if not pieces or stop is None or entry["sent"] < stop:
        return True
    if "stall" in fault:
        await asyncio.sleep(fault.get("stall_for", FOR_EVER_SECONDS))
    if "reset" in fault:
        await _sent(send)
        reset(send)
    return False


def _spoilt(pieces: Iterable[bytes], flip: int | None, stop: int | None) -> Iterator[bytes]:
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


async def _sent(send: Send) -> None:
    """Wait until what was sent has left; a reset would throw it away."""
    transport = send.__self__.transport  # type: ignore[attr-defined]
    while transport.get_write_buffer_size() and not transport.is_closing():
        await asyncio.sleep(POLL_SECONDS)
    await asyncio.sleep(0.05)  # what the client has not read is lost by a reset, too
