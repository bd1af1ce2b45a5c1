"""Text on its way to a terminal, a log or a pipe, and every exception as an error with a hint.

Results go to stdout, messages to stderr. Names of checkpoints, repositories and files are foreign
text. They move no cursor and end no line, and no line starts a workflow command, which a CI runner
would carry out.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from qaudit.errors import Interrupted, MachineError, QauditError, Stopped, UsageError
from qaudit.support.keys import INSTALL

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
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:  # without Unicode, blocks become ASCII letters
        from qaudit.report.format import in_ascii

        text = in_ascii(text).encode(encoding, "replace").decode(encoding)
    _write(sys.stdout, text)


def say(text: str) -> None:
    """Print a message on stderr."""
    _message(_harmless(text.rstrip("\n")))


def complain(error: QauditError) -> None:
    """Print an error and its hint; what is in backticks, and a command, stay on one line."""
    for word, text, style in (("error", error.message, "1;31"), ("hint", error.hint, "1")):
        if text or word == "error":
            lines = f"{word}: {one_line(text)}"
            if sys.stderr.isatty():
                whole = r"`[^`]*`|(?<=: )qaudit .*"
                lines = re.sub(whole, lambda match: match[0].replace(" ", "\0"), lines)
                wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns)
                wrapper.break_long_words = wrapper.break_on_hyphens = False
                lines = wrapper.fill(lines).replace("\0", " ")
            if _has_colours(sys.stderr):
                lines = lines.replace(word, _coloured(word, style), 1)
            _message(lines if word == "error" else f"\n{lines}")


def one_line(text: str) -> str:
    """Return text in one line, without control characters and workflow commands."""
    return _harmless(" ".join(text.splitlines()))


def _coloured(word: str, style: str) -> str:
    return f"\x1b[{style}m{word}\x1b[0m"


def _has_colours(stream: TextIO) -> bool:
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return not plain and stream.isatty()


def _harmless(text: str) -> str:
    return _without_commands("".join(c if c.isprintable() or c == "\n" else "?" for c in text))


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


AGAIN = "run the same command again"
"""A hint that ends so gets the command as it was typed."""


def explained(error: BaseException) -> QauditError:
    """Return the error to print; of an unexpected one, print where it was raised."""
    if isinstance(error, QauditError):
        if error.hint.endswith(AGAIN):
            error.hint = f"{error.hint}: {shlex.join(['qaudit', *sys.argv[1:]])}"
        return error
    if isinstance(error, KeyboardInterrupt) and error.args and sys.argv[1:2] == ["part"]:
        stopped = f"the part was stopped by {error.args[0]}; what was measured is kept"
        return explained(Stopped(stopped, hint=AGAIN))
    if isinstance(error, KeyboardInterrupt):
        return explained(Interrupted("interrupted", hint=AGAIN))
    if isinstance(error, SystemExit):  # no command of qaudit ends so
        module = _frames(error)[-1]
        return MachineError(
            f"`{module}` ended the process with exit code {error.code or 0}, in the middle of this",
            hint="uninstall or fix that plug-in; measured results are kept",
        )
    if isinstance(error, MemoryError):
        return MachineError(
            "memory ran out", hint="free some, or raise the limit that `ulimit -v` prints"
        )
    if (package := _being_imported(error)) is not None:
        if isinstance(error, ModuleNotFoundError):
            return MachineError(f"this needs `{package}`, which is not installed", hint=INSTALL)
        reason = " ".join(str(error).split()) or type(error).__name__
        return MachineError(
            f"`{package}` is installed and cannot be loaded: {reason}",
            hint=f"install it again, then look with `qaudit doctor`; {INSTALL} brings all of it",
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename)
        return UsageError(
            f"`{name[:40]}...` is no name of a file: it has {len(name)} characters",
            hint="name a file or folder that is there, or something that `qaudit list` prints",
        )
    if isinstance(error, OSError):
        return MachineError(
            f"`{error.filename or 'output'}`: {(error.strerror or str(error)).lower()}",
            hint="fix that and run the same command again: measured results are kept",
        )
    say("".join(traceback.format_exception(error)))
    return MachineError(
        "this is a bug of qaudit, and says nothing about any audit",
        hint="report it with the lines above, once no name in them is a secret",
    )


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Say where results are kept when the work is interrupted."""
    try:
        yield
    except KeyboardInterrupt as error:
        places = [f"`{p}`" for p in (out.with_name(f".{out.name}.begun"), out) if p.is_dir()]
        what = f"what was measured is in {places[-1]}" if places else "nothing is kept yet"
        raise Interrupted(f"interrupted; {what}", hint=AGAIN) from error


def _being_imported(error: BaseException) -> str | None:
    """Return the package, not ours, whose import raised an error; none if no import did."""
    if isinstance(error, ImportError) and error.name:
        return None if error.name.startswith("qaudit") else error.name.partition(".")[0]
    importing = False
    for frame in _frames(error):
        module = frame.partition(".")[0]
        if importing and module not in ("qaudit", "importlib", "__main__"):
            return module
        importing = importing or module == "importlib"
    return "a library" if isinstance(error, ImportError) else None


def _frames(error: BaseException) -> list[str]:
    """Return the modules that a traceback leads through; `importlib` for Python's own."""
    return [
        "importlib"
        if frame.f_code.co_filename.startswith("<frozen importlib")
        else frame.f_globals.get("__name__", "")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
