"""What the command line says to people, on stderr, and how it draws progress."""

from __future__ import annotations

import os
import re
import sys
from threading import Lock

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from qaudit.core.sizes import part_of, size
from qaudit.errors import QauditError
from qaudit.types.watch import Watch


class _Talk(Console):
    """Stderr; whoever stops listening there changes neither the result nor its code."""

    def on_broken_pipe(self) -> None:
        """Fall silent, where rich would end with the code of a breach."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


talk = _Talk(stderr=True, highlight=False, soft_wrap=True)

_NOT_TO_BE_SAID = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What moves a cursor, colours, rings, or turns text around; and halves of characters."""


def complain(error: QauditError) -> None:
    """Say what went wrong and what to do about it."""
    talk.print(f"[bold red]error[/]: {_plain(error.message)}")
    if error.hint:
        talk.print(f"\n[bold]hint[/]: {_plain(error.hint)}")


def note(text: str) -> None:
    """Say something in passing."""
    talk.print(_plain(text))


def print_result(text: str) -> None:
    """Print what was asked for, and nothing else, on stdout.

    Renderers leave control characters of names out; here is where none gets past.
    """
    text = _NOT_TO_BE_SAID.sub("?", text)
    try:
        typer.echo(_sayable(text.rstrip("\n")))
    except BrokenPipeError:  # whoever reads has seen enough, as in `qaudit report out | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sayable(text: str) -> str:
    """Put text into what stdout can say: without Unicode, blocks become letters of ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        from qaudit.report.sparkline import in_ascii

        return in_ascii(text).encode(encoding, "replace").decode(encoding)
    return text


def _plain(text: str) -> str:
    return escape(_printable(text))


def _printable(text: str) -> str:
    """Replace control characters, so that no name moves a cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


class _Count(ProgressColumn):
    """How much is done: so many of so many, or bytes."""

    def render(self, task: Task) -> Text:
        """Print one task's count."""
        if not task.fields["in_bytes"]:
            return Text(f"{task.completed:.0f}/{task.total or 0:.0f}")
        return Text(part_of(round(task.completed), round(task.total or 0)).replace(" of ", "/"))


class _What(ProgressColumn):
    """What is being done, or how fast bytes come."""

    def render(self, task: Task) -> Text:
        """Print at most 14 letters."""
        text = str(task.fields["what"])
        speed = task.finished_speed or task.speed
        if task.fields["in_bytes"] and speed:
            text = f"{size(speed)}/s"
        return Text(f"{text:<14.14}")


class Bars(Watch):
    """Progress bars on stderr; none when it is not a terminal, or when `quiet`.

    Where there are no bars, what was fetched is said in a line when it is there. Lines stand
    above the bars. `fetched` and `said` may be called by any thread.
    """

    def __init__(self, *, quiet: bool) -> None:
        """Draw nothing until something is said."""
        self._quiet, self._drawn = quiet, sys.stderr.isatty()  # whatever FORCE_COLOR says
        self._progress = Progress(
            TextColumn("{task.description:<24.24}", markup=False),  # labels are not markup
            BarColumn(),
            _Count(),
            _What(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=talk,
            disable=quiet or not self._drawn,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._label = ""
        self._fetching: tuple[str, bool] = ("", True)  # what, and whether all of it is there
        self._lock = Lock()

    def __enter__(self) -> Bars:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""
        self._progress.stop()

    def subject(self, done: int, total: int, label: str) -> None:
        """Move the subjects' bar; the blocks' bar begins anew."""
        self._move("subjects", done, total, "subjects", "")
        if "blocks" in self._tasks:
            self._progress.reset(self._tasks["blocks"])
        self._label = label

    def block(self, done: int, total: int, what: str) -> None:
        """Move the blocks' bar."""
        self._move("blocks", done, total, self._label, what)

    def training(self, run: str, step: int, steps: int, what: str) -> None:
        """Move the bar of a training run."""
        self._move(run, step, steps, run, what)

    def counted(self, what: str, done: int, total: int) -> None:
        """Move the bar of something that is counted."""
        self._move(what, done, total, what, "")

    def fetched(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        """Move the bar of what is being fetched; it begins anew with every checkpoint."""
        whole = done_nbytes >= total_nbytes
        with self._lock:
            before, self._fetching = self._fetching, (what, whole)
            if before[0] != what and "fetch" in self._tasks:
                self._progress.reset(self._tasks["fetch"])
            self._move("fetch", done_nbytes, total_nbytes, what, "", in_bytes=True)
            if whole and before != self._fetching and not self._drawn:
                self.said(f"{what}: {size(total_nbytes)} are there and checked")

    def said(self, text: str) -> None:
        """Say something in passing, above the bars."""
        if not self._quiet:
            note(text)

    def _move(
        self,
        bar: str,
        done: int,
        total: int,
        description: str,
        what: str,
        *,
        in_bytes: bool = False,
    ) -> None:
        description = _printable(description)
        if bar not in self._tasks:
            self._tasks[bar] = self._progress.add_task(
                description, total=total, what=what, in_bytes=in_bytes
            )
        self._progress.update(
            self._tasks[bar], completed=done, total=total, description=description, what=what
        )
