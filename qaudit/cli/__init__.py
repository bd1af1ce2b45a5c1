"""The command line: parse, call, print. Results go to stdout, everything else to stderr.

`main` is the one place where errors become text and exit codes:

    0 done   1 gate breached   2 usage   3 incomplete or inconclusive
    4 environment, Hub or GPU failure   75 part stopped   78 part refused   130 interrupted

Python itself ends with 1 after an unexpected error, which a pipeline would read as a breached
gate. So every such error ends with 4, an import that fails and memory that runs out included:
this module imports almost nothing before `main` is there to catch it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

Commands = Callable[[list[str]], int]

_LAST_MESSAGE_NBYTES = 1 << 20
"""Memory set aside for the message that ends a process whose memory ran out."""


def main(commands: Commands | None = None) -> NoReturn:
    """Run a command of qaudit, or of other commands that end as these do."""
    reserve = bytearray(_LAST_MESSAGE_NBYTES)
    try:
        code = _run(commands)
    except BaseException as error:  # noqa: BLE001 - nothing may end with Python's own 1
        del reserve
        code = _end(error)
    sys.exit(code)


def _run(commands: Commands | None) -> int:
    _stop_at_signals()
    # Threads that spin while they wait take the core from other work. Torch reads this when it
    # starts its threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `2>&-`: replaced by one that discards
            devnull = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(devnull, "w", encoding="utf-8"))
    from qaudit.host import share_one_arena

    share_one_arena()  # before there are threads
    if commands is not None:
        return commands(sys.argv)
    from qaudit.cli.app import run

    return run(sys.argv)


def _stop_at_signals() -> None:
    """End by SIGTERM as by an interrupt: with the way to resume.

    A scheduler that wants the machine of a part back sends SIGUSR1 or SIGUSR2, too, and may do so
    while libraries are imported.
    """
    import signal

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    is_part = sys.argv[1:2] == ["part"]
    for name in ("SIGTERM", *(("SIGUSR1", "SIGUSR2") if is_part else ())):
        signal.signal(getattr(signal, name), stop)


def _end(error: BaseException) -> int:
    try:
        from qaudit.cli.terminal import complain, explained

        failure = explained(error)
        complain(failure)
    except BaseException:  # noqa: BLE001 - not even the message fits into memory
        os.write(2, b"error: the process ended, and could not say why; most often memory ran out\n")
        return 4
    return failure.code
