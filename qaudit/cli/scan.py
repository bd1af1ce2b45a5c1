"""`qaudit scan`: measure checkpoints and soups under quantization schemes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.cli.failures import resumable
from qaudit.cli.options import AsJson, DryRun, Quiet, Targets, Verbose, with_settings
from qaudit.cli.terminal import print_result, say

if TYPE_CHECKING:
    from qaudit.audit import Audit
    from qaudit.cli.progress import Progress
    from qaudit.planning.prepare import Prepared


@with_settings()
def scan(
    targets: Targets,
    *,
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
    from qaudit.cli.progress import Progress
    from qaudit.report.card import render_terminal
    from qaudit.report.plan import render_plan
    from qaudit.saved.audits import plan_to_json, to_json

    if dry_run:
        from qaudit.planning.prepare import prepare

        with Progress(quiet=quiet) as progress:
            plan = prepare(targets, settings, progress).plan
        print_result(plan_to_json(plan) if as_json else render_plan(plan))
        return 0
    audit = scanned(targets, settings, quiet=quiet, verbose=verbose)
    print_result(to_json(audit.record) if as_json else render_terminal(audit.record))
    if not quiet:
        for row in audit.skipped:
            say(f"skipped {row.subject}: {row.reason}")
        for row in audit.record.diagnostics.skipped:
            say(f"{row.subject} went without {row.diagnostic}: {row.reason}")
        say(f"wrote {audit.folder / 'card.md'}, report.html, audit.json, evidence/ and plots/")
    return 3 if audit.skipped or audit.record.diagnostics.skipped else 0


def scanned(
    targets: Sequence[str], settings: Mapping[str, Any], *, quiet: bool, verbose: bool = False
) -> Audit:
    """Print the plan, run it, and return the audit."""
    from qaudit.audit import complete
    from qaudit.cli.progress import Progress

    out = output_folder(targets, settings)
    with resumable(out), Progress(quiet=quiet, verbose=verbose) as progress:
        return complete(prepared(targets, settings, progress), watch=progress)


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
    """Return the requested output folder, or the default one of these targets."""
    from qaudit.planning.prepare import folder_name

    return settings.get("out") or Path("qaudit-out") / folder_name(targets)
