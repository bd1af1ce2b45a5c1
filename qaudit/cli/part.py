"""`qaudit part`: measure one part of a plan."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from qaudit.cli.options import Quiet, Verbose, option, with_settings
from qaudit.cli.terminal import say
from qaudit.errors import Stopped, UsageError
from qaudit.settings import MEASURE

INDICES = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")
"""Variables in which Slurm and Kubernetes put the number of a part."""


@with_settings("stream_memory", "disk_budget", "allow_pickle", "trust_remote_code")
def part(
    out: Path,
    part: Annotated[
        str,
        option(
            MEASURE,
            "Part K of N, counted from 0; N alone where Slurm or Kubernetes gives K.",
            metavar="K/N",
        ),
    ],
    *,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **settings: Any,
) -> int:
    """Measure one part of the plan in OUT; what is measured already is left alone.

    Exits 0 if the part is done, 3 if subjects failed, 75 if it was stopped (run it again), 78 if
    this environment or device is not fit for the plan.

    Example: qaudit part out --part 0/8
    """
    from qaudit.cli.progress import Progress
    from qaudit.executors.part import run_part
    from qaudit.recipe.table import split_settings
    from qaudit.report.format import plural

    number, count = part_of(part)
    _, options = split_settings(settings)
    with _stoppable(number, count), Progress(quiet=quiet, verbose=verbose) as progress:
        outcome = run_part(out, number, count, options, progress)
    if not quiet:
        say(
            f"part {number}/{count}: {plural(outcome.units, 'subject')}, "
            f"{outcome.measured} measured now, "
            f"{len(outcome.failed)} failed"
        )
    return 3 if outcome.failed else 0


def part_of(text: str) -> tuple[int, int]:
    """Parse `K/N`, or N where the environment gives K."""
    number, _, count = text.rpartition("/")
    number = number or next((os.environ[name] for name in INDICES if os.environ.get(name)), "")
    if not (number.isdecimal() and count.isdecimal() and int(count) > 0):
        raise UsageError(
            f"`--part {text}` is no part",
            hint="write K/N, as `--part 0/8`; K may come from " + " or ".join(INDICES),
        )
    return int(number), int(count)


@contextmanager
def _stoppable(number: int, count: int) -> Iterator[None]:
    """End with 75 when a scheduler wants the machine back: SIGTERM, SIGUSR1 or SIGUSR2."""
    received: list[str] = []

    def stop(signum: int, _: object) -> None:
        received.append(signal.Signals(signum).name)
        raise KeyboardInterrupt

    for number_of_signal in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number_of_signal, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        if not received:
            raise
        raise Stopped(
            f"part {number}/{count} was stopped by {received[0]}; what was measured is kept",
            hint="run the same command again",
        ) from error
