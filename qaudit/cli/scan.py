"""`qaudit scan`: measure checkpoints and soups under quantization schemes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from qaudit.cli.failures import resumable
from qaudit.cli.options import AsJson, DryRun, Quiet, Targets, Verbose, option, with_settings
from qaudit.cli.terminal import print_result, say
from qaudit.errors import MissingParts, UsageError
from qaudit.settings import EXECUTE

if TYPE_CHECKING:
    from qaudit.cli.progress import Progress
    from qaudit.executors.records import Executor
    from qaudit.planning.prepare import Prepared
    from qaudit.tables import Audit


_NOT_KEPT = "it is a soup of a search, or was measured without `--keep`; `export` makes them again"


@with_settings()
def scan(
    targets: Targets,
    *,
    executor: Annotated[
        str | None,
        option(
            EXECUTE,
            "in-process, local (a process for each part here) or slurm (a job array).",
            show_default="in-process; local with --gpus",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        option(
            EXECUTE,
            "Use N GPUs of this machine, or all. Each search for a soup uses one of them.",
            metavar="N|all",
        ),
    ] = None,
    workers: Annotated[
        int, option(EXECUTE, "Processes of `--executor local` without GPUs.", min=1)
    ] = 2,
    parts: Annotated[int, option(EXECUTE, "Tasks of the Slurm array at most.", min=1)] = 16,
    slurm: Annotated[
        list[str] | None,
        option(EXECUTE, "Options of sbatch, as '--account=x --gres=gpu:1'; repeatable."),
    ] = None,
    detach: Annotated[
        bool, option(EXECUTE, "Submit to Slurm and return; the same command follows.", "--detach")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
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
    from qaudit.report.plan import render_plan
    from qaudit.saved.audits import plan_to_json
    from qaudit.saved.exports import not_kept

    name = executor_named(executor, gpus)
    if dry_run:
        from qaudit.planning.prepare import prepare

        with Progress(quiet=quiet) as progress:
            plan = prepare(targets, settings, progress).plan
        print_result(plan_to_json(plan) if as_json else render_plan(plan))
        return 0
    chosen: dict[str, Any] = {"executor": name, "gpus": gpus, "workers": workers, "parts": parts}
    chosen |= {"slurm": slurm, "detach": detach}
    try:
        with planned(targets, settings, quiet=quiet, verbose=verbose) as (work, progress):
            audit = complete(executor_of(work, chosen, progress), sign=work.options.sign)
            kept = kept_specs(work.options.keep, parse_schemes(work.plan.specs))
    except MissingParts as error:
        if error.code:
            raise
        say(f"{error.message}; {error.hint}")  # submitted, and not waited for
        return 0
    code = show_audit(audit, as_json=as_json, quiet=quiet)
    for subject, scheme in () if quiet else not_kept(audit.record, audit.folder, kept):
        say(f"the weights of {subject} at {scheme} are not kept: {_NOT_KEPT}")
    return code


def show_audit(audit: Audit, *, as_json: bool, quiet: bool) -> int:
    """Print what was measured, and say what was not; return the exit code."""
    from qaudit.report.card import render_terminal
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


EXECUTORS = ("in-process", "local", "slurm")


def executor_named(name: str | None, gpus: str | None) -> str:
    """Return the executor that options choose; refuse them before anything is planned."""
    name = name or ("in-process" if gpus is None else "local")
    if name not in EXECUTORS:
        raise UsageError(f"there is no executor `{name}`", hint=f"one of {', '.join(EXECUTORS)}")
    if gpus is None:
        return name
    if name != "local":
        raise UsageError(
            f"`--gpus` is an option of `--executor local`, and `--executor {name}` is given",
            hint="leave one of them out",
        )
    if gpus != "all" and not re.fullmatch("[1-9][0-9]{0,3}", gpus):
        raise UsageError(f"`--gpus {gpus}` is no number of GPUs", hint="write one from 1, or `all`")
    return name


def executor_of(prepared: Prepared, chosen: Mapping[str, Any], progress: Progress) -> Executor:
    name, gpus, device = chosen["executor"], chosen["gpus"], prepared.plan.device
    if gpus is not None and not device.startswith("cuda"):
        raise UsageError(
            f"`--gpus {gpus}` is given, and the plan computes on `{device}`",
            hint="use `--executor local --workers 2`, or plan with `--device cuda` where GPUs are",
        )
    if name == "in-process":
        from qaudit.audit import in_process

        return in_process(prepared, progress)
    from qaudit.executors.folder import pin

    run = pin(prepared)
    options = _part_options(prepared)
    out = prepared.out
    if name == "slurm":
        from qaudit.executors.queues import Slurm

        sbatch = [word for text in chosen["slurm"] or () for word in shlex.split(text)]
        count, detach = chosen["parts"], chosen["detach"]
        return Slurm(
            run, out, parts=count, sbatch=sbatch, options=options, detach=detach, watch=progress
        )
    from qaudit.executors.queues import Pool, cpu_workers, gpu_workers

    workers = cpu_workers(chosen["workers"]) if gpus is None else gpu_workers(gpus)
    return Pool(run, out, workers, options, progress)


def _part_options(prepared: Prepared) -> list[str]:
    options = prepared.options
    switches = ("allow_pickle", "trust_remote_code", "no_checkpoints")
    flags = [f"--{name.replace('_', '-')}" for name in switches if getattr(options, name)]
    for name in ("stream_memory", "disk_budget"):
        if (value := getattr(options, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", f"{value}B"]
    flags += ["--keep", ",".join(options.keep)] if options.keep else []
    return flags
