"""What `qaudit scan` does once its options are parsed: plan, say the price, run, write, print."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.cli.speech import Bars, note, print_result
from qaudit.downloads.brought import RECORD_FILE
from qaudit.errors import Interrupted, UsageError
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import is_hub
from qaudit.planning.detectable import with_detectable
from qaudit.planning.diagnoses import with_needed_again
from qaudit.planning.lock import (
    LOCK_FILE,
    holds_the_hub,
    is_lock,
    other_choices,
    pinned,
    pinned_or_resolved,
    read_lock,
    write_lock,
)
from qaudit.planning.plan import make_plan
from qaudit.planning.resolve import Resolved, needs_hub, still_there
from qaudit.planning.traffic import missing_nbytes
from qaudit.recipe import is_recipe, recipe_of
from qaudit.recipe.arguments import parse_nbytes
from qaudit.recipe.table import recipe_from
from qaudit.report.folder import must_take_files, write_folder
from qaudit.report.plan import render_plan
from qaudit.saved.audits import plan_to_json, to_json
from qaudit.types import Audit, Plan, Recipe, digest

if TYPE_CHECKING:
    from qaudit.engine.run import Options

LONGEST_NAME = 80  # characters of an output folder that nobody named


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
_KEYS = {"soup": "soups", "stage": "stages", "diagnose": "diagnostics"}


@dataclass(frozen=True)
class Work:
    """A plan, and what it was made from."""

    recipe: Recipe  # as it was asked for
    resolved: Resolved
    plan: Plan
    hub: Hub | None


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
        work = planned(request, out, bars)
        return _run(work, out, request, bars)


def planned(request: Request, out: Path, bars: Bars) -> Work:
    """Plan, say the price, and pin what is on the Hub."""
    must_take_files(out)
    work = _plan(request, out, bars)
    if not request.quiet:
        note(render_plan(work.plan))
    if holds_the_hub(work.resolved):
        write_lock(work.resolved, work.recipe, out / LOCK_FILE)
    return work


def _plan(request: Request, out: Path, bars: Bars) -> Work:
    asked = {_KEYS.get(name, name): value for name, value in request.asked.items()}
    limit = _nbytes(request.stream_memory)
    budget = _nbytes(request.disk_budget)
    locks = [target for target in asked["targets"] if is_lock(target)]
    recipe, given = _from_lock(locks[0], asked) if locks else (recipe_of(**asked), None)
    on_hub = needs_hub(recipe) or (given is not None and holds_the_hub(given))
    hub = open_hub(watch=bars) if on_hub else None
    if given is None or request.update:
        path = Path(locks[0]) if locks else out / LOCK_FILE
        given = pinned_or_resolved(recipe, path, hub, update=request.update)
    plan = make_plan(
        recipe,
        hub=hub,
        resolved=given,
        stream_limit_nbytes=limit,
        disk_budget_nbytes=budget,
        record=out / RECORD_FILE,
        allow_pickle=request.allow_pickle,
        trust_remote_code=request.trust_remote_code,
    )
    plan = with_needed_again(with_detectable(plan, out / "evidence"), out / "evidence")
    return Work(recipe, given, plan, hub)


def _from_lock(target: str, asked: dict[str, Any]) -> tuple[Recipe, Resolved]:
    """Return what a lock holds, with the options beside it that choose nothing."""
    if len(asked["targets"]) > 1:
        raise UsageError(
            f"`{target}` is a lock and stands beside other targets", hint="scan a lock by itself"
        )
    if chosen := other_choices(asked):
        raise UsageError(
            f"`{target}` says already which checkpoints and texts are measured, "
            f"and `{chosen[0]}` would change that",
            hint="leave it out, or scan the targets themselves",
        )
    recipe, resolved = read_lock(Path(target))
    if not still_there(recipe, resolved):
        raise UsageError(
            f"the folders that `{target}` was made from do not hold what they held then",
            hint="scan the targets themselves",
        )
    others = {key: value for key, value in asked.items() if key != "targets"}
    recipe = recipe_from({**asdict(recipe), **others})
    return recipe, pinned(recipe, resolved)


def _run(work: Work, out: Path, request: Request, bars: Bars) -> Audit:
    from qaudit.engine.run import run  # imports torch: after the plan is on the screen

    return run(work.plan, options_of(work, out, request), bars)


def options_of(work: Work, out: Path, request: Request) -> Options:
    """Return how a plan is run."""
    from qaudit.engine.run import Options

    return Options(
        out=out,
        stream_limit_nbytes=_nbytes(request.stream_memory),
        allow_pickle=request.allow_pickle,
        trust_remote_code=request.trust_remote_code,
        self_check=request.self_check,
        cross_check=request.cross_check,
        hub=work.hub,
        disk_budget_nbytes=_for_weights(work.plan),
    )


def _for_weights(plan: Plan) -> int | None:
    """Return what of the disk budget the texts leave for weights."""
    if plan.traffic is None or plan.traffic.nbytes_disk_budget is None:
        return None
    return plan.traffic.nbytes_disk_budget - missing_nbytes(plan.texts)


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


def _nbytes(text: str | None) -> int | None:
    return parse_nbytes(text) if text else None


def folder_name(targets: list[str]) -> str:
    """Name an output folder after all targets, so that other targets have another one."""
    name = "+".join(re.sub(r"[^A-Za-z0-9._-]+", "-", _called(target)) for target in targets)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{digest(list(targets))[:8]}"


def _called(target: str) -> str:
    path = Path(target)
    if is_lock(target):
        name = path.name.removesuffix(".lock.json")
        return path.absolute().parent.name if name == "plan" else name
    if is_recipe(target):
        return path.stem
    return target.removeprefix("hf://") if is_hub(target) else path.name or path.resolve().name
