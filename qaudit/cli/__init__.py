"""The command line: parse, call, print. Whatever computes is imported inside a command.

Results go to stdout, talk and progress to stderr. This is the one place where errors are
turned into text and exit codes:

    0 done   1 gate breached   2 usage   3 incomplete or inconclusive
    4 environment, Hub or GPU failure   130 interrupted

Python itself ends with 1 when it is at a loss, and a pipeline would take that for a breach of the
gate: so what nobody foresaw ends with 4, too.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from qaudit.cli.app import app
from qaudit.errors import MachineError, QauditError


def main() -> None:
    """Run the command line and exit."""
    # Threads that wait for each other by spinning take the core from whoever they wait for, as
    # soon as the machine has other work. Read when torch loads its threads, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _open_what_is_closed()
    try:
        with _NoBugIsABreach():
            app(standalone_mode=True, prog_name=_called())
    except QauditError as error:
        _end(error)
    except OSError as error:  # what the system refuses where nobody foresaw it
        _end(
            MachineError(
                f"`{error.filename or 'output'}`: {(error.strerror or str(error)).lower()}",
                hint="mend that and run the same command again: what was measured is kept",
            )
        )


def _end(error: QauditError) -> None:
    from qaudit.cli.speech import complain  # takes a third of the time that `--help` has

    with suppress(OSError):  # the log's disk is full: the code says it all the same
        complain(error)
    sys.exit(error.exit_code)


class _NoBugIsABreach:
    """Ends with the code of a failure when something is raised that is neither ours nor meant."""

    def __enter__(self) -> None:
        """Watch."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show where it happened, and say what it is."""
        foreseen = (QauditError, OSError, SystemExit, KeyboardInterrupt)
        if error is None or isinstance(error, foreseen):
            return
        traceback.print_exception(kind, error, trace)
        _end(
            MachineError(
                "this is a bug of qaudit, and says nothing about any audit",
                hint="report it with the lines above, once no name in them is a secret",
            )
        )


def _open_what_is_closed() -> None:
    """Let nothing be said where a stream was closed, as by `2>&-`: Python has None there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8"))


def _called() -> str:
    """Return what a person typed: `hf qaudit` runs a script of its own."""
    return "hf qaudit" if Path(sys.argv[0]).stem == "hf-qaudit" else "qaudit"
