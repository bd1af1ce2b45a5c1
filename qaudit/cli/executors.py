"""Which executor runs a scan: this process, a process for each part here, or a Slurm array."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qaudit.errors import UsageError

if TYPE_CHECKING:
    from qaudit.cli.progress import Progress
    from qaudit.executors.events import Executor
    from qaudit.planning.prepare import Prepared

EXECUTORS = ("in-process", "local", "slurm")


def executor_of(
    prepared: Prepared, chosen: Mapping[str, Any], progress: Progress
) -> Executor | None:
    """Return the executor that options choose; None runs the passes in this process."""
    name = chosen["executor"] or ("local" if chosen["gpus"] else "in-process")
    if name not in EXECUTORS:
        raise UsageError(f"there is no executor `{name}`", hint=f"one of {', '.join(EXECUTORS)}")
    if name == "in-process":
        return None
    from qaudit.executors.pinned import pin

    run = pin(prepared)
    options = _part_options(prepared)
    out = prepared.out
    if name == "slurm":
        from qaudit.executors.slurm import Slurm

        sbatch = [word for text in chosen["slurm"] or () for word in shlex.split(text)]
        count, detach = chosen["parts"], chosen["detach"]
        return Slurm(
            run, out, parts=count, sbatch=sbatch, options=options, detach=detach, watch=progress
        )
    from qaudit.executors.pool import Pool, cpu_workers, gpu_workers

    workers = gpu_workers(chosen["gpus"]) if chosen["gpus"] else cpu_workers(chosen["workers"])
    return Pool(run, out, workers, options, progress)


def _part_options(prepared: Prepared) -> list[str]:
    """Return the options of a scan that each of its parts needs, too."""
    options = prepared.options
    switches = ("allow_pickle", "trust_remote_code")
    flags = [f"--{name.replace('_', '-')}" for name in switches if getattr(options, name)]
    for name in ("stream_memory", "disk_budget"):
        if (value := getattr(options, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", f"{value}B"]
    return flags
