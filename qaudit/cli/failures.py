"""Every exception that reaches the command line, as an error with a sentence and a hint."""

from __future__ import annotations

import errno
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from qaudit.cli.terminal import say
from qaudit.errors import Interrupted, MachineError, QauditError, Stopped, UsageError
from qaudit.support.extras import INSTALL

AGAIN = "run the same command again"
"""A hint that ends so gets the command as it was typed."""


def explained(error: BaseException) -> QauditError:
    """Return the error to print; of an unexpected one, print where it was raised."""
    if isinstance(error, QauditError):
        if error.hint.endswith(AGAIN):
            error.hint = f"{error.hint}: {shlex.join(['qaudit', *sys.argv[1:]])}"
        return error
    if isinstance(error, KeyboardInterrupt) and error.args and sys.argv[1:2] == ["part"]:
        stopped = f"the part was stopped by {error.args[0]}; what was measured is kept"
        return explained(Stopped(stopped, hint=AGAIN))
    if isinstance(error, KeyboardInterrupt):
        return explained(Interrupted("interrupted", hint=AGAIN))
    if isinstance(error, SystemExit):  # no command of qaudit ends so
        module = _frames(error.__traceback__)[-1]
        return MachineError(
            f"`{module}` ended the process with exit code {error.code or 0}, in the middle of this",
            hint="uninstall or fix that plug-in; measured results are kept",
        )
    if isinstance(error, MemoryError):
        return MachineError(
            "memory ran out", hint="free some, or raise the limit that `ulimit -v` prints"
        )
    if (package := _being_imported(error)) is not None:
        return _not_loaded(package, error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename)
        return UsageError(
            f"`{name[:40]}...` is no name of a file: it has {len(name)} characters",
            hint="name a file or folder that is there, or something that `qaudit list` prints",
        )
    if isinstance(error, OSError):
        return MachineError(
            f"`{error.filename or 'output'}`: {(error.strerror or str(error)).lower()}",
            hint="fix that and run the same command again: measured results are kept",
        )
    say("".join(traceback.format_exception(error)))
    return MachineError(
        "this is a bug of qaudit, and says nothing about any audit",
        hint="report it with the lines above, once no name in them is a secret",
    )


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Say where results are kept when the work is interrupted."""
    try:
        yield
    except KeyboardInterrupt as error:
        kept = next(filter(_holds_results, (out, out.with_name(f".{out.name}.begun"))), None)
        what = "nothing is kept yet" if kept is None else f"results are kept in `{kept}`"
        raise Interrupted(f"interrupted; {what}", hint=AGAIN) from error


def _holds_results(folder: Path) -> bool:
    """Return whether a folder has more than a plan."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return any(not name.startswith(".qaudit") for name in names - {"plan.json", "parts"})


def _being_imported(error: BaseException) -> str | None:
    """Return the package, not ours, whose import raised an error; none if no import did."""
    if isinstance(error, ImportError) and error.name:
        return None if error.name.startswith("qaudit") else error.name.partition(".")[0]
    importing = False
    for frame in _frames(error.__traceback__):
        module = frame.partition(".")[0]
        if importing and module not in ("qaudit", "importlib", "__main__"):
            return module
        importing = importing or module == "importlib"
    return "a library" if isinstance(error, ImportError) else None


def _frames(trace: TracebackType | None) -> list[str]:
    """Return the modules that a traceback leads through; `importlib` for Python's own."""
    names = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frozen = code.co_filename.startswith("<frozen importlib")
        names.append("importlib" if frozen else trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return names


def _not_loaded(package: str, error: BaseException) -> MachineError:
    if isinstance(error, ModuleNotFoundError):
        return MachineError(f"this needs `{package}`, which is not installed", hint=INSTALL)
    reason = " ".join(str(error).split()) or type(error).__name__
    return MachineError(
        f"`{package}` is installed and cannot be loaded: {reason}",
        hint=f"install it again, then look with `qaudit doctor`; {INSTALL} brings all of it",
    )
