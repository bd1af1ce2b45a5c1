"""The body of a file: that it is the one asked for, and exactly the bytes that were asked for.

What was offered is compared before the first byte is handed on: the commit, the blob, the
part. Then bytes are passed on as they come, in pieces of bounded size, so that a connection
that breaks every few bytes still makes progress. Too few are a transfer that broke off; too
many are another file than the one listed.

A server that ignores a range is read from its beginning, and what was not asked for is
skipped: it costs traffic and loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from qaudit.errors import HubError
from qaudit.hub.entries import DroppedError
from qaudit.hub.refusals import Asked
from qaudit.hub.wire import Answer

PIECE_NBYTES = 1 << 20


def must_be_offered(asked: Asked, told: Mapping[str, str], blob: str | None) -> None:
    """Refuse bytes of another commit, or of another blob than the one listed."""
    tag = told.get("x-linked-etag") or told.get("etag", "")
    commit = told.get("x-repo-commit", "")
    for what, words, name in (("commit", commit, asked.revision), ("blob", tag, blob)):
        found = words.removeprefix("W/").strip('"')
        if name is not None and found != name:
            shown = ascii(found)[1:-1][:64] if found else "nothing"
            raise HubError(
                f"the Hub offers another {what} for {asked.where}: `{shown}`, not `{name}`",
                hint="the server, or a proxy in between, serves other files than it lists",
            )


def skipped(answer: Answer, start: int, stop: int) -> int:
    """Return how many bytes come before those asked for: none if the range was honoured."""
    if answer.status != 206:
        return start
    told = re.match(r"bytes (\d{1,18})-(\d{1,18})/", answer.headers.get("content-range", ""))
    if not told or (int(told[1]), int(told[2]) + 1) != (start, stop):
        raise answer.garbled("it sends another part than it was asked for")
    return 0


def rest_of(answer: Answer, skip: int, nbytes: int) -> Iterator[bytes]:
    """Yield `nbytes` after the first `skip`, as they come, and then the body must end."""
    _must_not_announce_less(answer, skip + nbytes)
    left = nbytes
    for piece in _after(skip, answer.pieces()):
        if len(piece) > left:
            raise answer.garbled("it sends more bytes than it listed")
        left -= len(piece)
        yield piece
    if left:
        raise DroppedError(f"it ended {left} bytes early")


def part_of(answer: Answer, skip: int, nbytes: int) -> bytes:
    """Return `nbytes` after the first `skip`, and read no further."""
    _must_not_announce_less(answer, skip + nbytes)
    pieces, left = [], nbytes
    for piece in _after(skip, answer.pieces()):
        pieces.append(piece[:left])
        left -= len(pieces[-1])
        if not left:
            return b"".join(pieces)
    raise DroppedError(f"it ended {left} bytes early")


def _after(skip: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for whole in pieces:
        piece, skip = whole[skip:], max(0, skip - len(whole))
        for at in range(0, len(piece), PIECE_NBYTES):
            yield piece[at : at + PIECE_NBYTES]


def _must_not_announce_less(answer: Answer, nbytes: int) -> None:
    announced = answer.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:18]) < nbytes:
        raise DroppedError(f"it announces {announced[:18]} bytes where {nbytes} are due")
