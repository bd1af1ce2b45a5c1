"""How long to wait before a call is made again, and when to stop.

The Hub counts calls in windows of five minutes and says when the next one opens; that is
waited out. A server that says nothing is given longer and longer pauses, a fraction of them
drawn from the call itself, so that several workers do not come back in the same instant and a
test knows every number. A machine that cannot be reached at all is given up sooner: after a
mistyped address or without a network, half a minute of waiting helps no one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

from qaudit.errors import UnreachableError
from qaudit.hub.entries import RESUME, DroppedError
from qaudit.hub.refusals import LOG_IN

TRIES, TRIES_UNREACHED = 6, 3
LONGEST_WAIT_SECONDS = 360.0
"""A window of the Hub and some; who is asked to wait longer had better come back later."""

_WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
_WAITS_LIMITED_SECONDS = (15.0, 30.0, 60.0, 120.0, 120.0)  # past the end of a window
_RATE_LIMIT = re.compile(r'"\w+"\s*;\s*r\s*=\s*(\d{1,9})\s*;\s*t\s*=\s*(\d{1,9})')


def tries(dropped: DroppedError) -> int:
    """Return how often in all a call is made that fails like this."""
    return TRIES_UNREACHED if dropped.unreached else TRIES


def asked_wait_seconds(status: int, headers: Mapping[str, str], now: float) -> float | None:
    """Return how long an answer asks to wait, if it does; `now` is in seconds since 1970."""
    rate = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    if status == 429 and rate is not None and int(rate[1]) == 0:
        return int(rate[2]) + 1.0  # its clock counts whole seconds
    after = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,300}", after, re.ASCII):
        return float(after)
    try:
        date = parsedate_to_datetime(after)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now)


def next_wait_seconds(dropped: DroppedError, failures: int, call: str, endpoint: str) -> float:
    """Return how long to wait before a call is made again, or say that it is of no use."""
    wait = wait_seconds(dropped, failures, call)
    if wait > LONGEST_WAIT_SECONDS:
        raise UnreachableError(
            f"the Hub asks to wait {wait:.6g} s before it tells {call}",
            hint=f"when that time is over, {RESUME}; to be let in more often, {LOG_IN}",
        ) from dropped
    if failures >= tries(dropped):
        raise UnreachableError(
            f"`{endpoint}` does not tell {call}, asked {failures} times: {dropped.reason}",
            hint=f"when it can be reached, {RESUME}",
        ) from dropped
    return wait


def wait_in_words(dropped: DroppedError, wait: float, call: str) -> str:
    """Say why a call waits, and how long."""
    if dropped.wait_seconds is not None:
        return f"the Hub asks to wait {wait:.0f} s ({dropped.status})"
    return f"{call}: {dropped.reason}; trying again in {wait:.0f} s"


def wait_seconds(dropped: DroppedError, failures: int, call: str) -> float:
    """Return how long to wait after the given number of failures: as asked, or longer each time."""
    if dropped.wait_seconds is not None:
        return dropped.wait_seconds
    waits = _WAITS_LIMITED_SECONDS if dropped.status == 429 else _WAITS_SECONDS
    fraction = zlib.crc32(f"{call} {failures}".encode()) / 2**32
    return waits[min(failures, len(waits)) - 1] * (0.75 + 0.5 * fraction)
