"""Text on its way to a terminal, a log or a pipe: results to stdout, messages to stderr.

Names of checkpoints, repositories and files are foreign text. They move no cursor and end no
line, and no line starts a workflow command, which a CI runner would carry out.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import TextIO

from qaudit.errors import QauditError

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Moves a cursor, colours, rings, or turns text around; and halves of characters."""

_VERDICT = re.compile(r"^(SHIP|HOLD|UNDECIDED|INCOMPLETE)\b", re.MULTILINE)
_COLOURS = {"SHIP": "1;32", "HOLD": "1;31", "UNDECIDED": "1;33", "INCOMPLETE": "1;33"}

_WORKFLOW_COMMAND = re.compile(r"^(\s*):(?=:)|#(?=#\[)", re.MULTILINE)


def print_result(text: str, *, workflow_commands: bool = False) -> None:
    """Print a result on stdout; workflow commands are kept only where they are the result."""
    text = _CONTROL.sub("?", text.rstrip("\n"))
    text = text if workflow_commands else _without_commands(text)
    if _has_colours(sys.stdout):
        text = _VERDICT.sub(lambda match: _coloured(match[0], _COLOURS[match[0]]), text)
    _write(sys.stdout, _encodable(text, sys.stdout))


def say(text: str) -> None:
    """Print a message on stderr."""
    _message(_without_commands(_printable(text.rstrip("\n"))))


def complain(error: QauditError) -> None:
    _message(_styled(_wrapped(f"error: {one_line(error.message)}"), "error", "1;31"))
    if error.hint:
        _message("\n" + _styled(_wrapped(f"hint: {one_line(error.hint)}"), "hint", "1"))


def one_line(text: str) -> str:
    """Return text in one line, without control characters and workflow commands."""
    return _without_commands(_printable(" ".join(text.splitlines())))


def _wrapped(text: str) -> str:
    """Break lines between words on a terminal; what is in backticks, and a command, stay whole."""
    if not sys.stderr.isatty():
        return text
    whole = re.sub(r"`[^`]*`|(?<=: )qaudit .*", lambda match: match[0].replace(" ", "\0"), text)
    columns = shutil.get_terminal_size().columns
    lines = textwrap.wrap(whole, columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def _styled(text: str, word: str, style: str) -> str:
    """Colour the word that a text begins with."""
    return text.replace(word, _coloured(word, style), 1) if _has_colours(sys.stderr) else text


def _coloured(word: str, style: str) -> str:
    return f"\x1b[{style}m{word}\x1b[0m"


def _has_colours(stream: TextIO) -> bool:
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return not plain and stream.isatty()


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _without_commands(text: str) -> str:
    return _WORKFLOW_COMMAND.sub(lambda match: f"{match[1] or ''}?", text)


def _message(text: str) -> None:
    """Write to stderr; a reader that is gone or a full disk changes nothing."""
    try:
        _write(sys.stderr, text)
    except OSError:
        _discard(sys.stderr)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `qaudit report out | head`
        _discard(stream)
    except OSError:  # a full disk: Python would say so again at its end
        _discard(stream)
        raise


def _discard(stream: TextIO) -> None:
    """Let nothing more be written, not even when Python flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _encodable(text: str, stream: TextIO) -> str:
    """Put text into what a stream can encode: without Unicode, blocks become ASCII letters."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        from qaudit.report.format import in_ascii

        return in_ascii(text).encode(encoding, "replace").decode(encoding)
    return text
