"""`qaudit plan`: pin a plan, so that several processes can measure parts of it."""

from __future__ import annotations

from typing import Annotated, Any

from qaudit.cli.options import AsJson, Quiet, Targets, option, with_settings
from qaudit.cli.terminal import print_result, say
from qaudit.settings import COMPUTE


@with_settings()
def plan(
    targets: Targets,
    *,
    threads: Annotated[
        int | None,
        option(
            COMPUTE,
            "Threads of each part on a CPU.",
            min=1,
            show_default="OMP_NUM_THREADS, or every core",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Pin a plan for several processes: a cluster, several GPUs, several machines.

    Then `qaudit part OUT --part K/N` measures part K of N, and `qaudit collect OUT` judges.

    Example: qaudit plan demo --out out
    """
    from qaudit.cli.progress import Progress
    from qaudit.cli.scan import output_folder, prepared
    from qaudit.executors.pinned import pin
    from qaudit.saved.audits import plan_to_json

    out = output_folder(targets, settings)
    with Progress(quiet=quiet) as progress:
        work = prepared(targets, settings, progress)
        run = pin(work, threads)
    if as_json:
        print_result(plan_to_json(run.plan))
    if not quiet:
        say(
            f"wrote {out / 'plan.lock.json'} and {out / 'parts' / 'plan.json'}\n"
            f"measure a part of N: qaudit part {out} --part 0/N; then: qaudit collect {out}"
        )
    return 0
