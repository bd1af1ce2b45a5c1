"""One request and the answer to it, as values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.support.hub.contents import Kind

Headers = Mapping[str, str | int | None]


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
    def segments(self) -> list[str]:
        return [unquote(segment) for segment in self.path.strip("/").split("/")]

    @property
    def query(self) -> dict[str, str]:
        found = parse_qs(self.query_text, keep_blank_values=True)
        return {name: values[-1] for name, values in found.items()}

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"{}")

    def flag(self, name: str) -> bool:
        """Say whether a parameter of the query is on."""
        return self.query.get(name, "").lower() in ("1", "true")


@dataclass(frozen=True)
class Reply:
    """What the server answers; a header that is None is left out."""

    status: int = 200
    body: bytes | Iterable[bytes] = b""
    headers: Headers = field(default_factory=dict)


class RefusedError(Exception):
    """Raised by whatever finds that the request cannot be granted."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def as_json(value: object, status: int = 200, headers: Headers | None = None) -> Reply:
    """Return an answer of JSON."""
    kind = {"Content-Type": "application/json; charset=utf-8"}
    return Reply(status, json.dumps(value).encode(), kind | dict(headers or {}))


def refusal(
    status: int, message: str, code: str | None = None, headers: Headers | None = None
) -> RefusedError:
    """Return an error in the Hub's shape: the message twice, and a code the client understands."""
    named: Headers = {"X-Error-Message": message, "X-Error-Code": code, **(headers or {})}
    return RefusedError(as_json({"error": message}, status, named))


# --------------------------------------------------------------------------------------------------
# What an address names.


@dataclass(frozen=True)
class Place:
    """The words that a route found in an address."""

    kind: Kind = "model"
    owner: str = ""
    name: str = ""
    revision: str = "main"
    path: str = ""
    number: str = ""
    verb: str = ""

    @property
    def repo(self) -> str:
        """The repo's key in `Hub.repos`."""
        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"{prefix}{self.owner}/{self.name}"


# --------------------------------------------------------------------------------------------------
# How many requests a client may make: fixed windows, and the headers that tell of them.


class Quota:
    """Counts requests per window; `{"api": (requests, seconds), "resolvers": (...)}`."""

    def __init__(self, limits: Mapping[str, tuple[int, int]], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._windows: dict[str, tuple[float, int]] = {}  # when it began, what it has seen

    def count(self, request: Request) -> Headers:
        """Return the headers that say what is left; refuse what exceeds it."""
        bucket = "resolvers" if "resolve" in request.path else "api"
        if bucket not in self._limits or request.at_cdn:
            return {}
        limit, seconds = self._limits[bucket]
        now = self._clock()
        began, used = self._windows.get(bucket, (now, 0))
        if now - began >= seconds:
            began, used = now, 0
        self._windows[bucket] = (began, used + 1)
        left, wait = limit - used - 1, int(began + seconds - now) + 1
        headers = {
            "RateLimit": f'"{bucket}";r={max(0, left)};t={wait}',
            "RateLimit-Policy": f'"fixed window";"{bucket}";q={limit};w={seconds}',
        }
        if left < 0:
            raise refusal(429, "We had to rate limit your IP.", headers=headers)
        return headers
