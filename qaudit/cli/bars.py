"""Progress bars on a terminal. The one place that loads rich."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TimeElapsedColumn
from rich.text import Text

from qaudit.report.format import duration
from qaudit.support.sizes import part_of, size

_OTHER_COLUMNS = 70
"""Letters that a row needs beside its name."""

_SHORTEST_NAME = 24
_WIDE = 100
"""Columns of a terminal; in fewer, names and bars are shorter, so that a row fits 80."""
_SHORT_NAME, _SHORT_BAR, _SHORT_WHAT = 14, 8, 12


class _RowText(ProgressColumn):
    """What a function makes of a row; names of checkpoints are no markup."""

    def __init__(self, text: Callable[[Task], str | Text]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        text = self._text(task)
        return Text(text) if isinstance(text, str) else text


def _count(task: Task) -> str:
    """Return how much is done: 3/24, or bytes."""
    total = task.total or 0
    if task.fields["in_bytes"]:
        return part_of(round(task.completed), round(total)).replace(" of ", "/")
    return f"{task.completed:.0f}/{total:.0f}"


def _time_left(task: Task) -> str:
    """Return the time left: of all subjects in their own row, of all else in its own."""
    seconds = task.fields["left"] or (task.time_remaining if task.fields["in_bytes"] else None)
    return f"{duration(seconds)} left" if seconds else ""


class Bars:
    """One bar for each thing that is counted."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True, highlight=False)

        def is_wide() -> bool:
            return console.width >= _WIDE

        def name(task: Task) -> Text:
            least = _SHORTEST_NAME if is_wide() else _SHORT_NAME
            text = Text(task.description.ljust(least))
            text.truncate(max(least, console.width - _OTHER_COLUMNS), overflow="ellipsis")
            return text

        def what(task: Task) -> str:
            """Return what is being done, or how fast bytes come."""
            speed = task.finished_speed or task.speed
            fast = f"{size(speed)}/s" if task.fields["in_bytes"] and speed else ""
            width = 14 if is_wide() else _SHORT_WHAT
            return f"{fast or task.fields['what']:<{width}.{width}}"

        bar, elapsed = BarColumn(30 if is_wide() else _SHORT_BAR), TimeElapsedColumn()
        texts = [_RowText(text) for text in (name, _count, what, _time_left)]
        columns = (texts[0], bar, *texts[1:3], elapsed, texts[3])
        self.progress = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self.progress.start()

    def stop(self) -> None:
        self.progress.stop()

    def subject(self, done: int, total: int, label: str, left_seconds: float | None) -> None:
        """Move the bar of all subjects; that of the blocks begins anew."""
        self.move("subjects", done, total, "subjects", "")
        self.left("subjects", left_seconds)
        if "blocks" in self._tasks:
            self.progress.reset(self._tasks["blocks"], description=label)

    def left(self, bar: str, left_seconds: float | None) -> None:
        if bar in self._tasks:
            self.progress.update(self._tasks[bar], left=left_seconds)

    def download(self, what: str, done: int, total: int, anew: bool) -> None:
        if anew and "fetch" in self._tasks:
            self.progress.reset(self._tasks["fetch"])
        self.move("fetch", done, total, what, "", in_bytes=True)

    def move(
        self, bar: str, done: int, total: int, name: str, what: str, *, in_bytes: bool = False
    ) -> None:
        """Move a bar, or draw a new one."""
        if bar not in self._tasks:
            self._tasks[bar] = self.progress.add_task(
                name, total=total, what=what, in_bytes=in_bytes, left=None
            )
        self.progress.update(
            self._tasks[bar], completed=done, total=total, description=name, what=what
        )
