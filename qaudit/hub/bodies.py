"""The response to a request for a file: the right file, and exactly the requested bytes of it.

The commit, the blob and the range are compared before the first byte is used. Then bytes are
passed on as they come, in pieces of bounded size, so that a connection that breaks every few
bytes still makes progress. Too few are a transfer that broke off; too many are another file than
the one listed. A server that ignores a range is read from the file's beginning: that costs
traffic alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import httpx2

from qaudit.errors import HubError
from qaudit.hub.failures import DroppedError, Request

PIECE_NBYTES = 1 << 20


class Answer:
    """An open response, with the Hub's own headers also where a redirect led elsewhere."""

    def __init__(
        self,
        response: httpx2.Response,
        hub_headers: Mapping[str, str],
        garbled: Callable[[str], HubError],
    ) -> None:
        self._response, self.hub_headers, self.garbled = response, hub_headers, garbled
        self.status, self.headers = response.status_code, response.headers

    def next_page(self) -> str | None:
        return self._response.links.get("next", {}).get("url")

    def pieces(self, *, decoded: bool = False) -> Iterator[bytes]:
        """Yield the body as it comes; raise `DroppedError` where it breaks off."""
        body = self._response.iter_bytes() if decoded else self._response.iter_raw()
        try:
            yield from body
        except httpx2.HTTPError as error:
            raise dropped_by(error) from error


def dropped_by(error: Exception) -> DroppedError:
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


def check_offer(request: Request, headers: Mapping[str, str], blob: str | None) -> None:
    """Refuse bytes of another commit, or of another blob than the one listed."""
    tag = headers.get("x-linked-etag") or headers.get("etag", "")
    commit = headers.get("x-repo-commit", "")
    for what, value, expected in (("commit", commit, request.revision), ("blob", tag, blob)):
        name = value.removeprefix("W/").strip('"')
        if expected is not None and name != expected:
            shown = ascii(name)[1:-1][:64] if name else "nothing"
            raise HubError(
                f"the Hub offers another {what} for {request.where}: `{shown}`, not `{expected}`",
                hint="the server, or a proxy in between, serves other files than it lists",
            )


def nbytes_before(answer: Answer, start: int, stop: int) -> int:
    """Return how many bytes come before the requested ones: none if the range was honoured."""
    if answer.status != 206:
        return start
    match = re.match(r"bytes (\d{1,18})-(\d{1,18})/", answer.headers.get("content-range", ""))
    if not match or (int(match[1]), int(match[2]) + 1) != (start, stop):
        raise answer.garbled("it sends another part than it was asked for")
    return 0


def rest_of(answer: Answer, skip: int, nbytes: int) -> Iterator[bytes]:
    """Yield `nbytes` after the first `skip`, as they come, and then the body must end."""
    _check_length(answer, skip + nbytes)
    remaining = nbytes
    for piece in _after(skip, answer.pieces()):
        if len(piece) > remaining:
            raise answer.garbled("it sends more bytes than it listed")
        remaining -= len(piece)
        yield piece
    if remaining:
        raise DroppedError(f"it ended {remaining} bytes early")


def part_of(answer: Answer, skip: int, nbytes: int) -> bytes:
    """Return `nbytes` after the first `skip`, and read no further."""
    _check_length(answer, skip + nbytes)
    pieces, remaining = [], nbytes
    for piece in _after(skip, answer.pieces()):
        pieces.append(piece[:remaining])
        remaining -= len(pieces[-1])
        if not remaining:
            return b"".join(pieces)
    raise DroppedError(f"it ended {remaining} bytes early")


def _after(skip: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for whole in pieces:
        piece, skip = whole[skip:], max(0, skip - len(whole))
        for at in range(0, len(piece), PIECE_NBYTES):
            yield piece[at : at + PIECE_NBYTES]


def _check_length(answer: Answer, nbytes: int) -> None:
    announced = answer.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:18]) < nbytes:
        raise DroppedError(f"it announces {announced[:18]} bytes where {nbytes} are due")
