"""`qaudit scan`: measure checkpoints and soups, here or in parts by several processes.

The commands of parts: plan, fetch, part, collect and status.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qaudit.cli.options import AsJson, DryRun, Quiet, Targets, option, with_settings
from qaudit.cli.terminal import print_result, resumable, say
from qaudit.errors import MissingParts, UsageError
from qaudit.settings import (
    MEASURE,
    Execution,
    Nbytes,
    Presets,
    Recipe,
    RunOptions,
    settings_of,
    words_of,
    written,
)

if TYPE_CHECKING:
    from qaudit.cli.progress import Progress
    from qaudit.executors.records import Executor
    from qaudit.planning.prepare import Prepared
    from qaudit.tables import Audit


OF_PARTS = ("allow_pickle", "trust_remote_code", "stream_memory", "disk_budget", "keep")
_NOT_KEPT = "it is a soup of a search, or was measured without `--keep`; `export` makes them again"


OPTIONS = ("schemes", "checkpoints", "soups", "evaluation", "calibration", "policy", "quick", "out")
MORE = ("bits", "shipped", "tasks", "device", "keep", "allow_pickle", "trust_remote_code")
"""Behind the first ten."""


@with_settings(
    *OPTIONS,
    more=(*MORE, "gpus"),
    keys=[k for k in settings_of(Recipe, Presets, RunOptions, Execution) if k != "threads"],
)
def scan(
    targets: Targets,
    *,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Measure what quantization does to checkpoints and soups, and write a report card.

    Run the same command again to resume after an interruption.

    Example: qaudit scan demo
    """
    from qaudit.audit import complete
    from qaudit.cli.progress import Progress
    from qaudit.core.registry import parse_schemes
    from qaudit.planning.price import kept_specs
    from qaudit.recipe.table import take
    from qaudit.report.plan import render_plan
    from qaudit.saved.audits import plan_to_json
    from qaudit.saved.exports import kept_files, not_kept
    from qaudit.support.sizes import size

    execution = checked(take(Execution, settings))
    if dry_run:
        from qaudit.planning.prepare import prepare

        with Progress(quiet=quiet) as progress:
            plan = prepare(targets, settings, progress).plan
        print_result(plan_to_json(plan) if as_json else render_plan(plan))
        return 0
    try:
        with planned(targets, settings, quiet=quiet, verbose=execution.verbose) as planning:
            work, progress = planning
            audit = complete(executor_of(work, execution, progress), sign=work.options.sign)
            kept = kept_specs(work.options.keep, parse_schemes(work.plan.specs))
    except MissingParts as error:
        if error.code:
            raise
        say(f"{error.message}; {error.hint}")  # submitted, and not waited for
        return 0
    code = show_audit(audit, as_json=as_json, quiet=quiet)
    for subject, scheme in () if quiet else not_kept(audit.record, audit.folder, kept):
        say(f"the weights of {subject} at {scheme} are not kept: {_NOT_KEPT}")
    if kept and not quiet:
        nbytes = sum(path.stat().st_size for path in kept_files(audit.folder))
        say(f"kept {size(nbytes)} of weights in {audit.folder / 'evidence' / 'kept'}, for `export`")
    return code


def show_audit(audit: Audit, *, as_json: bool, quiet: bool) -> int:
    """Print what was measured, and say what was not; return the exit code."""
    from qaudit.report.folder import render_terminal
    from qaudit.saved.audits import to_json

    undiagnosed = audit.record.diagnostics.skipped
    print_result(
        to_json(audit.record)
        if as_json
        else render_terminal(audit.record, folder=str(audit.folder))
    )
    if not quiet:
        for row in audit.skipped:
            under = f" under {row.scheme}" if row.scheme else ""
            say(f"skipped {row.subject}{under}: {row.reason}")
        for row in undiagnosed:
            say(f"{row.subject} went without {row.diagnostic}: {row.reason}")
        say(f"wrote {audit.folder / 'card.md'}, report.html, audit.json, evidence/ and plots/")
    return 3 if audit.skipped or undiagnosed else 0


@contextmanager
def planned(
    targets: Sequence[str], settings: Mapping[str, Any], *, quiet: bool, verbose: bool = False
) -> Iterator[tuple[Prepared, Progress]]:
    """Print the plan of a scan; say how to resume where its `with` body is interrupted."""
    from qaudit.cli.progress import Progress

    out = output_folder(targets, settings)
    with resumable(out), Progress(quiet=quiet, verbose=verbose) as progress:
        try:
            yield prepared(targets, settings, progress), progress
        except MissingParts as error:
            logs = f"`qaudit status {out}` and the logs in {out / 'parts'} tell how parts ended"
            error.hint = error.hint or f"{logs}; run the same command again"
            raise


def prepared(targets: Sequence[str], settings: Mapping[str, Any], progress: Progress) -> Prepared:
    """Make a plan and print it; an output folder that takes no files is refused first."""
    from qaudit.planning.prepare import prepare
    from qaudit.report.folder import must_take_files
    from qaudit.report.plan import render_plan

    must_take_files(output_folder(targets, settings))
    work = prepare(targets, dict(settings), progress)
    progress.note(render_plan(work.plan))
    return work


def output_folder(targets: Sequence[str], settings: Mapping[str, Any]) -> Path:
    from qaudit.planning.prepare import default_folder

    return settings.get("out") or default_folder(targets, settings)


def checked(execution: Execution) -> Execution:
    """Return the execution with its executor; refuse a wrong one before anything is planned."""
    gpus = execution.gpus
    name = execution.executor or ("in-process" if gpus is None else "local")
    if gpus is not None and name != "local":
        raise UsageError(
            f"`--gpus` is of the executor `local`, and `{written('executor', name)}` is given",
            hint="leave one of them out",
        )
    if gpus not in (None, "all") and not re.fullmatch("[1-9][0-9]{0,3}", gpus or ""):
        raise UsageError(f"`--gpus {gpus}` is no number of GPUs", hint="write one from 1, or `all`")
    return replace(execution, executor=name)


def executor_of(prepared: Prepared, execution: Execution, progress: Progress) -> Executor:
    """Return what runs the plan: this process, a pool of processes, or Slurm."""
    name, gpus, device = execution.executor, execution.gpus, prepared.plan.device
    if gpus is not None and not device.startswith("cuda"):
        raise UsageError(
            f"`--gpus {gpus}` is given, and the plan computes on `{device}`",
            hint=f"use `{written('executor', 'local')}`, or plan with `--device cuda` where GPUs "
            "are",
        )
    if name == "in-process":
        from qaudit.audit import in_process

        return in_process(prepared, progress)
    from qaudit.audit import pin

    run = pin(prepared)
    options: list[str] = []  # of `qaudit part`: what is not pinned in the plan
    for key in OF_PARTS:
        value, entry = getattr(prepared.options, key), settings_of(RunOptions)[key]
        value = ",".join(value) if isinstance(value, tuple) else value
        value = f"{value}B" if value and entry.type is Nbytes else value
        options += words_of(entry, value) if value else []
    out = prepared.out
    if name == "slurm":
        from qaudit.executors.queues import Slurm

        return Slurm(
            run,
            out,
            progress,
            parts=execution.parts,
            sbatch=[word for text in execution.slurm for word in shlex.split(text)],
            options=options,
            detach=execution.detach,
        )
    from qaudit.executors.queues import Pool, cpu_workers, gpu_workers

    workers = cpu_workers(execution.workers) if gpus is None else gpu_workers(gpus)
    return Pool(run, out, progress, workers=workers, options=options)


# ------------------------------------------------------------------ in parts


@with_settings(
    *OPTIONS,
    more=MORE,
    keys=[*(k for k in settings_of(Recipe, Presets, RunOptions) if k != "sign"), "threads"],
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
