"""How far a command has come, on stderr: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from qaudit.cli.terminal import one_line, say
from qaudit.report.format import duration
from qaudit.support.sizes import part_of, size
from qaudit.types import Watch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task, TaskID

SECONDS_BETWEEN_LINES = 30.0


class Progress(Watch):
    """Watches an audit, a download or anything that is counted; callable from every thread."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        """Draw bars if stderr is a terminal; print lines if not, and nothing if `quiet`."""
        self._quiet, self._verbose = quiet, verbose
        self._bars: Bars | None = None
        self._pace, self._rates = Pace(), Rates()
        self._subject = ""  # `[3/7] step1000`
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

    def expect(self, costs: Mapping[str, float]) -> None:
        self._pace.expect(costs)

    def subject(self, done: int, total: int, label: str, passes: int = 1) -> None:
        self._pace.subject(label, total - done - 1, passes)
        self._subject = f"[{done + 1}/{total}] {one_line(label)}" if done < total else ""
        if self._bars is not None:
            self._bars.subject(done, total, one_line(label), self._pace.left_seconds())
        elif done < total:
            self._now(self._subject, self._pace.left_seconds(), printed=True)

    def block(self, done: int, total: int, what: str) -> None:
        if self._subject:
            self._pace.block(done, total)
            bar, seconds = "subjects", self._pace.left_seconds()
        else:  # of an export, or of a file that is verified
            bar, seconds = "blocks", self._rates.left_seconds("blocks", done, total)
        label = self._subject.partition(" ")[2] or "blocks"
        if self._bars is not None:
            self._bars.move("blocks", done, total, label, what)
            self._bars.left(bar, seconds)
        if self._bars is None or self._verbose:
            before = f"{self._subject}: " if self._subject else ""
            line = f"{before}block {done}/{total}, {one_line(what)}"
            self._now(line, seconds, printed=self._verbose)

    def training(self, run: str, step: int, steps: int, what: str) -> None:
        if self._bars is not None:
            self._bars.move(run, step, steps, one_line(run), what)
        else:
            self._now(f"{one_line(run)}: step {step}/{steps}, {what}")

    def count(self, what: str, done: int, total: int, left_seconds: float | None = None) -> None:
        if left_seconds is None:
            left_seconds = self._rates.left_seconds(what, done, total)
        if self._bars is not None:
            self._bars.move(what, done, total, what, "")
            self._bars.left(what, left_seconds)
        else:
            self._now(f"{what}: {done}/{total}", left_seconds)

    def download(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        """Count bytes of a download; each checkpoint begins anew."""
        whole = done_nbytes >= total_nbytes
        with self._lock:
            before, self._fetched = self._fetched, (what, whole)
            if self._bars is not None:
                self._bars.download(one_line(what), done_nbytes, total_nbytes, before[0] != what)
            elif whole and before != self._fetched:
                self.note(f"{one_line(what)}: {size(total_nbytes)} downloaded and verified")
            elif not whole:
                so_far = part_of(done_nbytes, total_nbytes)
                self._now(f"downloading {one_line(what)}: {so_far}")

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
        from rich.text import Text

        console = console or Console(stderr=True, highlight=False)

        class RowText(progress.ProgressColumn):
            """What a function makes of a row; names of checkpoints are no markup."""

            def __init__(self, text: Callable[[Task], str | Text]) -> None:
                super().__init__()
                self._text = text

            def render(self, task: Task) -> Text:
                text = self._text(task)
                return Text(text) if isinstance(text, str) else text

        def name(task: Task) -> Text:
            least = 24 if console.width >= 100 else 14
            text = Text(task.description.ljust(least))
            others = 70  # letters that a row needs beside its name
            text.truncate(max(least, console.width - others), overflow="ellipsis")
            return text

        def counted(task: Task) -> str:
            """Return how much is done: 3/24, or bytes."""
            total = task.total or 0
            if task.fields["in_bytes"]:
                return part_of(round(task.completed), round(total)).replace(" of ", "/")
            return f"{task.completed:.0f}/{total:.0f}"

        def what(task: Task) -> str:
            """Return what is being done, or how fast bytes come."""
            speed = task.finished_speed or task.speed
            fast = f"{size(speed)}/s" if task.fields["in_bytes"] and speed else ""
            width = 14 if console.width >= 100 else 12
            return f"{fast or task.fields['what']:<{width}.{width}}"

        def remaining(task: Task) -> str:
            """Return the time left: of all subjects in their own row, of all else in its own."""
            seconds = task.fields["left"]
            seconds = seconds or (task.time_remaining if task.fields["in_bytes"] else None)
            return f"{duration(seconds)} left" if seconds else ""

        self.progress = progress.Progress(
            RowText(name),
            progress.BarColumn(30 if console.width >= 100 else 8),
            RowText(counted),
            RowText(what),
            progress.TimeElapsedColumn(),
            RowText(remaining),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self.progress.start()

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


class Pace:
    """Estimates when all subjects are measured, from the pace so far.

    Subjects weigh what they are planned to cost, where that is told, and otherwise alike. One
    whose results were kept takes no blocks, and does not count.
    """

    def __init__(self) -> None:
        self._begun: float | None = None
        self._costs: dict[str, float] | None = None  # of subjects that come; None: not told
        self._measured = 0.0  # cost of subjects
        self._cost, self._part = 0.0, 0.0  # of the present one
        self._behind = 0.0  # cost of those that follow
        self._passes, self._ended, self._block = 1, 0, 0  # of the present one

    def expect(self, costs: Mapping[str, float]) -> None:
        """Take what subjects that come are planned to cost."""
        self._costs = dict(costs)

    def subject(self, label: str, behind: int, passes: int = 1) -> None:
        if self._begun is None:
            self._begun = time.monotonic()
        self._measured += self._cost * (self._part > 0)
        if self._costs is None:
            self._cost, self._behind = 1.0, float(behind)
        else:
            self._cost = self._costs.pop(label, 0.0)  # a release has no cost
            self._behind = sum(self._costs.values())
        self._part = 0.0
        self._passes, self._ended, self._block = max(passes, 1), 0, 0

    def block(self, done: int, total: int) -> None:
        self._ended += done < self._block
        self._block = done
        # The head follows the last block, and takes about as long as one.
        part = (self._ended + done / (total + 1)) / self._passes
        self._part = max(self._part, min(part, 1.0))  # items of tasks go through once more

    def left_seconds(self) -> float | None:
        """Return the seconds that are left, once there is a pace."""
        worked = self._measured + self._part * self._cost
        if self._begun is None or worked <= 0:
            return None
        ahead = (1 - self._part) * self._cost + self._behind
        return (time.monotonic() - self._begun) / worked * ahead


class Rates:
    """Estimates when things that are counted are complete, each from its own rate."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[float, int]] = {}  # when, and how many there were

    def left_seconds(self, what: str, done: int, total: int) -> float | None:
        """Take a count; return the seconds that are left, once there is a rate."""
        now = time.monotonic()
        start, first = self._begun.get(what, (now, done))
        if done <= first:
            self._begun[what] = now, done  # it begins, or begins anew
            return None
        return (now - start) / (done - first) * (total - done)
