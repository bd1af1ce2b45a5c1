"""What the command line says to people, on stderr, and how it draws progress."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
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


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape("".join(c if c.isprintable() or c == "\n" else "?" for c in text))


class Bars:
    """One bar for subjects and one for blocks; nothing when stderr is not a terminal or `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        """Draw nothing until something is said."""
        self._quiet = quiet
        self._progress = Progress(
            TextColumn("{task.description:<24.24}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[what]:<14.14}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=talk,
            disable=quiet or not talk.is_terminal,
            transient=True,
        )
        self._subjects: TaskID | None = None
        self._blocks: TaskID | None = None

    def __enter__(self) -> Bars:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop drawing."""
        self._progress.stop()

    def subject(self, done: int, total: int, label: str) -> None:
        """Move the subjects' bar."""
        if self._subjects is None:
            self._subjects = self._progress.add_task("subjects", total=total, what="")
            self._blocks = self._progress.add_task("", total=None, what="", visible=False)
        self._progress.update(self._subjects, completed=done)
        assert self._blocks is not None
        self._progress.reset(self._blocks, description=label, visible=bool(label))
        if label and not self._quiet and not talk.is_terminal:
            note(f"[{done + 1}/{total}] {label}")

    def block(self, done: int, total: int, what: str) -> None:
        """Move the blocks' bar."""
        if self._blocks is not None:
            self._progress.update(self._blocks, completed=done, total=total, what=what)
