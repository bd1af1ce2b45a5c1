"""How many requests a client may make: fixed windows, and the headers that tell of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.support.hub.exchange import Headers, Request, refusal


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
