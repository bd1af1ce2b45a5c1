"""What `qaudit scan` does once its options are parsed: plan, say the price, run, write, print."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from qaudit.audit import run
from qaudit.cli.speech import Bars, note, print_result
from qaudit.errors import Interrupted
from qaudit.planning.prepare import Prepared, folder_name, prepare
from qaudit.report.folder import must_take_files, write_folder
from qaudit.report.plan import render_plan
from qaudit.saved.audits import plan_to_json, to_json
from qaudit.types import Audit


@dataclass(frozen=True)
class Request:
    """The options of one `scan`: what was asked of the recipe, and how to run it."""

    asked: dict[str, Any]
    out: Path | None = None
    stream_memory: str | None = None
    disk_budget: str | None = None
    update: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False
    self_check: bool = False
    cross_check: int = 0
    dry_run: bool = False
    as_json: bool = False
    quiet: bool = False


HOW_TO_RUN = tuple(field.name for field in fields(Request) if field.name != "asked")
_RUN = (
    "stream_memory", "disk_budget", "update", "allow_pickle", "trust_remote_code", "self_check",
    "cross_check",
)  # fmt: skip
_KEYS = {"soup": "soups", "stage": "stages", "diagnose": "diagnostics"}


def carry_out(request: Request) -> int:
    """Plan, run and report; return the exit code."""
    with going_on(folder_for(request)) as out:
        if request.dry_run:
            with Bars(quiet=request.quiet) as bars:
                plan = _plan(request, out, bars).plan
            print_result(plan_to_json(plan) if request.as_json else render_plan(plan))
            return 0
        audit = _measured(request, out)
        _show(audit, out, request)
    return 3 if audit.skipped or audit.diagnostics.skipped else 0


def scanned(target: str, *, quiet: bool) -> Path:
    """Scan a target as `qaudit scan TARGET` does, print no result, and return its folder."""
    return scanned_as(Request({"targets": [target]}, quiet=quiet))


def scanned_as(request: Request) -> Path:
    """Scan what was asked for, print no result, and return the folder that it was written to."""
    with going_on(folder_for(request)) as out:
        write_folder(_measured(request, out), out)
    return out


def folder_for(request: Request) -> Path:
    """Return the output folder that was asked for, or the one that targets are given."""
    return request.out or Path("qaudit-out") / folder_name(request.asked["targets"])


@contextmanager
def going_on(out: Path) -> Iterator[Path]:
    """Say how to go on where a person stops the work."""
    try:
        yield out
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted; what was measured is kept in `{out}`",
            hint=f"go on with: {shlex.join(['qaudit', *sys.argv[1:]])}",
        ) from error


def _measured(request: Request, out: Path) -> Audit:
    with Bars(quiet=request.quiet) as bars:
        return run(planned(request, out, bars), watch=bars).record


def planned(request: Request, out: Path, bars: Bars) -> Prepared:
    """Plan, and print the price."""
    must_take_files(out)
    work = _plan(request, out, bars)
    if not request.quiet:
        note(render_plan(work.plan))
    return work


def _plan(request: Request, out: Path, bars: Bars) -> Prepared:
    given = {_KEYS.get(name, name): value for name, value in request.asked.items()}
    targets = given.pop("targets")
    run = {name: getattr(request, name) for name in _RUN}
    return prepare(targets, {**given, **{k: v for k, v in run.items() if v}, "out": out}, bars)


def _show(audit: Audit, out: Path, request: Request) -> None:
    from qaudit.report.card import render_terminal

    write_folder(audit, out)
    print_result(to_json(audit) if request.as_json else render_terminal(audit))
    if not request.quiet:
        for skipped in audit.skipped:
            note(f"skipped {skipped.subject}: {skipped.reason}")
        for one in audit.diagnostics.skipped:
            note(f"{one.subject} went without {one.diagnostic}: {one.reason}")
        note(f"wrote {out / 'card.md'}, report.html, audit.json, evidence/ and plots/")
