"""What the command line says to people, on stderr, and how it draws progress."""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from qaudit.errors import QauditError

talk = Console(stderr=True, highlight=False, soft_wrap=True)


def complain(error: QauditError) -> None:
    """Say what went wrong and what to do about it."""
    talk.print(f"[bold red]error[/]: {_plain(error.message)}")
    if error.hint:
        talk.print(f"\n[bold]hint[/]: {_plain(error.hint)}")


def note(text: str) -> None:
    """Say something in passing."""
    talk.print(_plain(text))


def print_result(text: str) -> None:
    """Print what was asked for, and nothing else, on stdout."""
    try:
        typer.echo(text.rstrip("\n"))
    except BrokenPipeError:  # whoever reads has seen enough, as in `qaudit report out | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plain(text: str) -> str:
    return escape(_printable(text))


def _printable(text: str) -> str:
    """Replace control characters, so that no name moves a cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


class Bars:
    """Progress bars on stderr; none when it is not a terminal, or when `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        """Draw nothing until something is said."""
        self._progress = Progress(
            TextColumn("{task.description:<24.24}", markup=False),  # labels are not markup
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[what]:<14.14}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=talk,
            disable=quiet or not sys.stderr.isatty(),  # whatever FORCE_COLOR says
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

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

    def _move(self, bar: str, done: int, total: int, description: str, what: str) -> None:
        description = _printable(description)
        if bar not in self._tasks:
            self._tasks[bar] = self._progress.add_task(description, total=total, what=what)
        self._progress.update(
            self._tasks[bar], completed=done, total=total, description=description, what=what
        )
