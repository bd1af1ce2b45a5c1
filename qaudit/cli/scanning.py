"""What `qaudit scan` does once its options are parsed: plan, say the price, run, write, print."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from qaudit.cli.speech import Bars, note, print_result
from qaudit.engine.plan import make_plan
from qaudit.errors import Interrupted, UsageError
from qaudit.recipe import is_recipe, recipe_of
from qaudit.report.folder import must_take_files, write_folder
from qaudit.report.json import plan_to_json, to_json
from qaudit.report.plan import render_plan
from qaudit.types import Audit, Plan


@dataclass(frozen=True)
class Request:
    """The options of one `scan`: what was asked of the recipe, and how to run it."""

    asked: dict[str, Any]
    out: Path | None
    stream_memory: str | None
    allow_pickle: bool
    self_check: bool
    cross_check: int
    dry_run: bool
    as_json: bool
    quiet: bool


HOW_TO_RUN = tuple(field.name for field in fields(Request) if field.name != "asked")


def carry_out(request: Request) -> int:
    """Plan, run and report; return the exit code."""
    out = request.out or Path("qaudit-out") / _folder_name(request.asked["targets"][0])
    try:
        return _carry_out(request, out)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted; what was measured is kept in `{out}`",
            hint=f"go on with: {shlex.join(['qaudit', *sys.argv[1:]])}",
        ) from error


def _carry_out(request: Request, out: Path) -> int:
    asked = {"soups" if name == "soup" else name: v for name, v in request.asked.items()}
    recipe = recipe_of(**asked)
    limit = parse_nbytes(request.stream_memory) if request.stream_memory else None
    plan = make_plan(recipe, stream_limit_nbytes=limit, allow_pickle=request.allow_pickle)
    if request.dry_run:
        print_result(plan_to_json(plan) if request.as_json else render_plan(plan))
        return 0
    must_take_files(out)
    if not request.quiet:
        note(render_plan(plan))
    audit = _run(plan, out, limit, request)
    _show(audit, out, request)
    return 3 if audit.skipped else 0


def _run(plan: Plan, out: Path, limit: int | None, request: Request) -> Audit:
    from qaudit.engine.run import Options, run  # imports torch: after the plan is on the screen

    options = Options(
        out=out,
        stream_limit_nbytes=limit,
        allow_pickle=request.allow_pickle,
        self_check=request.self_check,
        cross_check=request.cross_check,
    )
    with Bars(quiet=request.quiet) as bars:
        return run(plan, options, bars)


def _show(audit: Audit, out: Path, request: Request) -> None:
    from qaudit.report.terminal import render_terminal

    write_folder(audit, out)
    print_result(to_json(audit) if request.as_json else render_terminal(audit))
    if not request.quiet:
        for skipped in audit.skipped:
            note(f"skipped {skipped.subject}: {skipped.reason}")
        note(f"wrote {out / 'card.md'}, audit.json, evidence/ and plots/")


def parse_nbytes(text: str) -> int:
    """Read a size such as `512MB`, `1.5GiB` or `1000000`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper())
    if match is None:
        raise UsageError(f"`{text}` is not a size", hint="write it as 512MB, 4GB or 1.5GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2] or " "))


def _folder_name(target: str) -> str:
    path = Path(target)
    name = path.stem if is_recipe(target) else path.name or path.resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)
