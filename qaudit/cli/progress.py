"""How far a command has come, on stderr: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from qaudit.cli.terminal import one_line, say
from qaudit.report.format import duration
from qaudit.support.sizes import part_of, size
from qaudit.types import Watch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 30.0


class Progress(Watch):
    """Watches an audit, a download or anything that is counted; callable from every thread."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        """Draw bars if stderr is a terminal; print lines if not, and nothing if `quiet`."""
        self._quiet, self._verbose = quiet, verbose
        self._bars: Bars | None = None
        self._rates = Rates()
        self._subject = ""  # `[3/7] step1000`
        self._subjects, self._part = (0, 0), 0.0  # before it, of how many; how far it is itself
        self._state = ""  # the line to print next, unless something newer comes
        self._fetched: tuple[str, bool] = ("", True)  # what, and whether all of it is here
        self._lock = Lock()
        self._closed = Event()

    def __enter__(self) -> Progress:
        if self._quiet:
            return self
        if sys.stderr.isatty():  # whatever FORCE_COLOR says
            self._bars = Bars()
        else:
            Thread(target=self._print_lines, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._bars is not None:
            self._bars.progress.stop()

    def _print_lines(self) -> None:
        while not self._closed.wait(SECONDS_BETWEEN_LINES):
            if self._state:
                self.note(self._state)

    def note(self, text: str) -> None:
        if not self._quiet:
            say(text)

    def subject(self, done: int, total: int, label: str) -> None:
        self._subjects, self._part = (done, total), 0.0
        self._subject = f"[{done + 1}/{total}] {one_line(label)}" if done < total else ""
        seconds = self._rates.left_seconds("subjects", done, total)
        if self._bars is not None:
            self._bars.restart("blocks")
            self._bars.move("subjects", done, total, "subjects", left_seconds=seconds)
        elif done < total:
            self._now(self._subject, seconds, printed=True)

    def block(self, done: int, total: int, what: str) -> None:
        begun, subjects = self._subjects
        if self._subject:  # the head follows the last block, and takes about as long as one
            self._part = max(self._part, done / (total + 1))  # some go through blocks again
            seconds = self._rates.left_seconds("subjects", begun + self._part, subjects)
        else:  # of an export, or of a file that is verified
            seconds = self._rates.left_seconds("blocks", done, total)
        if self._bars is not None:
            label = self._subject.partition(" ")[2] or "blocks"
            self._bars.move("blocks", done, total, label, what)
            of_subjects = "subjects", begun, subjects, "subjects"
            place = of_subjects if self._subject else ("blocks", done, total, label, what)
            self._bars.move(*place, left_seconds=seconds)
        if self._bars is None or self._verbose:
            before = f"{self._subject}: " if self._subject else ""
            line = f"{before}block {done}/{total}, {one_line(what)}"
            self._now(line, seconds, printed=self._verbose)

    def training(self, run: str, step: int, steps: int, what: str) -> None:
        if self._bars is not None:
            self._bars.move(run, step, steps, one_line(run), what)
        else:
            self._now(f"{one_line(run)}: step {step}/{steps}, {what}")

    def count(self, what: str, done: int, total: int) -> None:
        seconds = self._rates.left_seconds(what, done, total)
        if self._bars is not None:
            self._bars.move(what, done, total, what, left_seconds=seconds)
        else:
            self._now(f"{what}: {done}/{total}", seconds)

    def download(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        """Count bytes of a download; each checkpoint begins anew."""
        whole, so_far = done_nbytes >= total_nbytes, part_of(done_nbytes, total_nbytes)
        with self._lock:
            before, self._fetched = self._fetched, (what, whole)
            seconds = self._rates.left_seconds(f"fetch {what}", done_nbytes, total_nbytes)
            if self._bars is not None:
                if before[0] != what:
                    self._bars.restart("fetch")
                counted = so_far.replace(" of ", "/")
                place = "fetch", done_nbytes, total_nbytes, one_line(what)
                self._bars.move(*place, left_seconds=seconds, counted=counted)
            elif whole and before != self._fetched:
                self.note(f"{one_line(what)}: {size(total_nbytes)} downloaded and verified")
            elif not whole:
                self._now(f"downloading {one_line(what)}: {so_far}", seconds)

    def _now(self, line: str, left_seconds: float | None = None, *, printed: bool = False) -> None:
        """Keep the state for the next line, or print it at once."""
        remainder = "" if left_seconds is None else f", about {duration(left_seconds)} left"
        self._state = "" if printed else line + remainder
        if printed:
            self.note(line + remainder)


class Bars:
    """One bar for each thing that is counted. The one place that loads rich, which takes long.

    Where a terminal has fewer than 100 columns, names and bars are shorter, so that a row fits 80.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich import progress
        from rich.console import Console

        self._console = console = console or Console(stderr=True, highlight=False)

        def text(name: str) -> progress.TextColumn:
            return progress.TextColumn(f"{{task.{name}}}", markup=False)

        self.progress = progress.Progress(
            text("description"),
            progress.BarColumn(30 if console.width >= 100 else 8),
            text("fields[counted]"),
            text("fields[what]"),
            progress.TimeElapsedColumn(),
            text("fields[left]"),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self.progress.start()

    def restart(self, bar: str) -> None:
        """Remove a bar, so that the next one of its name begins anew."""
        if bar in self._tasks:
            self.progress.remove_task(self._tasks.pop(bar))

    def move(
        self,
        bar: str,
        done: int,
        total: int,
        name: str,
        what: str = "",
        *,
        left_seconds: float | None = None,
        counted: str = "",
    ) -> None:
        """Move a bar, or draw a new one."""
        from rich.text import Text

        is_wide = self._console.width >= 100
        least, width = (24, 14) if is_wide else (14, 12)
        row = Text(name.ljust(least))
        beside = 70  # letters that a row needs beside its name
        row.truncate(max(least, self._console.width - beside), overflow="ellipsis")
        if bar not in self._tasks:
            new = self.progress.add_task(row.plain, total=total, counted="", what="", left="")
            self._tasks[bar] = new
        self.progress.update(
            self._tasks[bar],
            completed=done,
            total=total,
            description=row.plain,
            counted=counted or f"{done}/{total}",
            what=f"{what:<{width}.{width}}",
            left=f"{duration(left_seconds)} left" if left_seconds else "",
        )


class Rates:
    """Estimates when things that are counted are complete, each from its own rate."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[float, float]] = {}  # when, and how many there were

    def left_seconds(self, what: str, done: float, total: float) -> float | None:
        """Take a count; return the seconds that are left, once there is a rate."""
        now = time.monotonic()
        start, first = self._begun.get(what, (now, done))
        if done <= first:
            self._begun[what] = now, done  # it begins, or begins anew
            return None
        return (now - start) / (done - first) * (total - done)
