"""The command line: parse, call, print. Whatever computes is imported inside a command.

Results go to stdout, talk and progress to stderr. This is the one place where errors are
turned into text and exit codes:

    0 done   1 gate breached   2 usage   3 incomplete or inconclusive
    4 environment, Hub or GPU failure   130 interrupted
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from qaudit.cli.app import app
from qaudit.cli.speech import complain
from qaudit.errors import MachineError, QauditError


def main() -> None:
    """Run the command line and exit."""
    # Threads that wait for each other by spinning take the core from whoever they wait for, as
    # soon as the machine has other work. Read when torch loads its threads, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(standalone_mode=True, prog_name=_called())
    except QauditError as error:
        complain(error)
        sys.exit(error.exit_code)
    except OSError as error:  # what the system refuses where nobody foresaw it
        complain(
            MachineError(
                f"`{error.filename or 'output'}`: {(error.strerror or str(error)).lower()}",
                hint="mend that and run the same command again: what was measured is kept",
            )
        )
        sys.exit(MachineError.exit_code)


def _called() -> str:
    """Return what a person typed: `hf qaudit` runs a script of its own."""
    return "hf qaudit" if Path(sys.argv[0]).stem == "hf-qaudit" else "qaudit"
