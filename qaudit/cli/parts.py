"""A plan measured in parts by several processes: plan, fetch, part, collect and status."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from qaudit.cli.options import AsJson, Quiet, Targets, names_of, option, with_settings
from qaudit.cli.scan import MORE, OPTIONS
from qaudit.cli.terminal import print_result, say
from qaudit.errors import UsageError
from qaudit.settings import MEASURE, Execution, Presets, Recipe, RunOptions


@with_settings(
    *OPTIONS,
    more=MORE,
    keys=(*names_of(Recipe, Presets, RunOptions, without=["sign"]), "threads"),  # `collect` signs,
)
def plan(
    targets: Targets,
    *,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Pin a plan for several processes: a cluster, several GPUs, several machines.

    Then `qaudit part OUT --part K/N` measures part K of N, and `qaudit collect OUT` judges.

    Example: qaudit plan demo --out out
    """
    from qaudit.audit import pin
    from qaudit.cli.progress import Progress
    from qaudit.cli.scan import output_folder, prepared
    from qaudit.recipe.table import take
    from qaudit.saved.audits import plan_to_json

    threads = take(Execution, settings).threads
    out = output_folder(targets, settings)
    with Progress(quiet=quiet) as progress:
        work = prepared(targets, settings, progress)
        run = pin(work, threads)
    if as_json:
        print_result(plan_to_json(run.plan))
    if not quiet:
        say(
            f"wrote {out / 'plan.json'}\n"
            f"measure a part of N: qaudit part {out} --part 0/N; then: qaudit collect {out}"
        )
    return 0


@with_settings("trust_remote_code")
def fetch(out: Path, *, quiet: Quiet = False, **settings: Any) -> int:
    """Download the texts, the small files and all weights of the plan in OUT; no torch is needed.

    Run it on a login node; the parts then run with HF_HUB_OFFLINE=1.

    Example: qaudit fetch out
    """
    from qaudit.cli.progress import Progress
    from qaudit.executors.folder import fetch_all
    from qaudit.report.format import plural

    with Progress(quiet=quiet) as progress:
        code = bool(settings.get("trust_remote_code"))
        checkpoints, whole, texts, failed = fetch_all(out, code=code, watch=progress)
    if not quiet:
        needed = f"{plural(checkpoints, 'checkpoint')} and {plural(texts, 'text')}"
        say(f"{whole} of {needed} are in the cache")
        for label, reason in failed.items():
            say(f"not downloaded {label}: {reason}")
    return 3 if failed else 0


INDICES = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")
"""Variables in which Slurm and Kubernetes put the number of a part."""


@with_settings(
    more=("allow_pickle", "trust_remote_code", "keep"),
    keys=("stream_memory", "disk_budget", "verbose"),
)
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
    **settings: Any,
) -> int:
    """Measure one part of the plan in OUT; what is measured already is left alone.

    Exits 0 if the part is done, 3 if subjects failed, 75 if it was stopped (run it again), 78 if
    this environment or device is not fit for the plan.

    Example: qaudit part out --part 0/8
    """
    from qaudit.cli.progress import Progress
    from qaudit.executors.part import run_part
    from qaudit.recipe.table import split_settings, take
    from qaudit.report.format import plural

    number, count = part_of(part)
    verbose = take(Execution, settings).verbose
    _, options = split_settings(settings)
    with Progress(quiet=quiet, verbose=verbose) as progress:
        units, measured, failed = run_part(out, number, count, options, progress)
    if not quiet:
        subjects = plural(units, "subject")
        say(f"part {number}/{count}: {subjects}, {measured} measured now, {failed} failed")
    return 3 if failed else 0


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


@with_settings(keys=("sign",))
def collect(
    out: Annotated[Path, typer.Argument(help="The folder of the plan.")],
    others: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[OTHER]...", help="Copies of it in which parts ran, too."),
    ] = None,
    *,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Judge what parts have measured, and write the card; no GPU and no torch is needed.

    Exits 3 while parts are missing, and names the round that is due: searches for soups, what
    ships rounded otherwise. Run the parts and `collect` again until it exits 0.

    Example: qaudit collect out
    """
    from qaudit import audit
    from qaudit.cli.progress import Progress
    from qaudit.cli.scan import show_audit
    from qaudit.errors import MissingParts

    try:
        with Progress(quiet=quiet) as progress:
            collected = audit.collect(
                out, *(others or ()), sign=bool(settings["sign"]), watch=progress
            )
    except MissingParts as error:
        error.hint = error.hint or (
            f"measure them: `qaudit part {out} --part K/N` for each K below N, then again"
        )
        raise
    return show_audit(collected, as_json=as_json, quiet=quiet)


def status(out: Path, *, as_json: AsJson = False) -> int:
    """Print what is measured, running, lost and missing in OUT, and the time that is left.

    A part is running or queued as squeue says; without Slurm, as its log and the processes of
    this host say. Exits 3 while anything is missing.

    Example: qaudit status out
    """
    from qaudit.executors.folder import render, run_status

    standing = run_status(out)
    print_result(json.dumps(standing.table, indent=1) if as_json else render(standing))
    return 3 if standing.state.missing else 0
